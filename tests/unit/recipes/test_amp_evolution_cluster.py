"""Evolution on a Ray cluster: workers follow the driver's choice, and their errors end the command in one line."""

import os
import subprocess
import sys

import pytest
import ray
from amp_commands import records, refusal, run, words
from support.waiting import TIMEOUT_S

from recipes.amp.evolution import __main__ as evolution
from verl_precision.paths import REPO

pytestmark = [pytest.mark.subprocess, pytest.mark.slow]
VARIABLE = "ENABLE_FP16_TRAINING"
SMALL = words(
    generations=1, population=2, replaced=1, episodes=1, revisions=0, recombinations=0, hidden=8, device="cpu"
)


@pytest.fixture(scope="module")
def session():
    """A local Ray cluster with one worker, in whose environment the variable is set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        context = ray.init(address="local", num_cpus=1, include_dashboard=False, **evolution.QUIET)
    yield context.address_info
    ray.shutdown()


def test_worker_follows_the_drivers_choice(session, tmp_path, monkeypatch, capsys):
    """Its own environment has the variable at 1."""
    assert ray.get(ray.remote(lambda: os.environ[VARIABLE]).remote()) == "1"
    monkeypatch.setenv(VARIABLE, "0")
    run(evolution, *SMALL, f"--out={tmp_path}")
    assert ray.is_initialized()
    assert f"fp16_training=False by environment ({VARIABLE}), float32" in capsys.readouterr().out
    members = [row for row in records(tmp_path) if row["kind"] == "member"]
    assert len(members) == 4
    assert {row["effective_dtype"] for row in members if row["generation"]} == {"float32"}
    (worker,) = {row["pid"] for row in members}
    assert worker != os.getpid()


def test_error_of_a_worker_is_one_line(session, tmp_path):
    storm = words(loss_scale=3e38, batch_size=1, epochs=9)
    message = refusal(evolution, *SMALL, f"--out={tmp_path}", "--fp16-training", *storm)
    assert message.startswith("32 optimizer steps in a row overflowed")


def test_missing_gpu_of_the_cluster_is_refused(session, tmp_path):
    refused = refusal(evolution, *SMALL, "--device=cuda", f"--out={tmp_path / 'run'}")
    assert refused == "device=cuda must be auto or cpu: Ray has no GPU here"
    assert ray.is_initialized() and not (tmp_path / "run").exists()


def test_command_joins_a_cluster(session, tmp_path):
    """The command joins this process's Ray and sets the variable differently from its workers."""
    command = [sys.executable, "-m", evolution.PROGRAM, *SMALL, f"--out={tmp_path}"]
    environment = os.environ | {VARIABLE: "0", "OMP_NUM_THREADS": "1", "RAY_ADDRESS": session["address"]}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert f"fp16_training=False by environment ({VARIABLE}), float32" in done.stdout
    assert ray.get(ray.remote(lambda: True).remote()), "the cluster is left running"
