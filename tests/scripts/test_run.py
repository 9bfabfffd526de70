"""The command ``scripts/run.py``, and how ``make run`` calls it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lib.files import write_json
from lib.paths import REPO
from lib.run.folder import start_record
from lib.run.job import VARIABLES, parse_job


def command(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, REPO / "scripts" / "run.py", *words], capture_output=True, text=True)


@pytest.mark.parametrize(
    "words",
    [
        ["PRECISION=fp61"],
        ["PRECISON=fp16"],
        ["STEPS=none"],
        ["MODEL=./no/such/model"],
        ["TRAIN=no-such.parquet"],
        ["ARGS=trainer.n_gpu=2"],
        ["ALGO=ppo", "RECIPE=flowrl"],
        ["ARGS=actor_rollout_ref.actor.flowrl.beta=0", "RECIPE=flowrl"],
    ],
)
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(words, tmp_path):
    refused(words, words[0].partition("=")[0], tmp_path)


def test_workers_that_ray_cannot_place_are_refused_before_it_starts(tmp_path):
    refused(["ARGS=trainer.n_gpus_per_node=64"], "trainer.n_gpus_per_node=64: must be at most 4: ", tmp_path)


def refused(words: list[str], begin: str, folder: Path) -> None:
    """Assert that the command refuses the words in one line that begins so, and leaves the folder empty."""
    done = command("DEVICE=cpu", f"OUT={folder / 'out'}", *words)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"run: {begin}")
    assert list(folder.iterdir()) == []


SANITY = ["EXPERIMENT=sanity_cpu", "DEVICE=cpu", "STEPS=40"]


def finished(out: Path, *words: str) -> Path:
    """Create the folder of a finished run of 40 steps."""
    job = parse_job([*SANITY, *words, f"OUT={out}"])
    record = start_record(job, out, 40)
    out.mkdir(parents=True)
    write_json(out / "run.json", record)
    (out / "metrics.jsonl").write_text('{"step": 1, "data": {}}\n')
    write_json(out / "summary.json", {})
    return out


def test_check_reports_which_runs_are_finished_and_writes_nothing(tmp_path):
    done, ahead = finished(tmp_path / "done"), tmp_path / "ahead"
    before = sorted(tmp_path.rglob("*"))
    checked = command("--check", "--", *SANITY, f"OUT={done}", "--", *SANITY, "SEED=2", f"OUT={ahead}")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout.splitlines()[-1]) == [
        {"out": str(done), "steps": 40, "finished": True},
        {"out": str(ahead), "steps": 40, "finished": False},
    ]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["PRECISON=fp16"], "PRECISON: is not a variable of this command; did you mean PRECISION?"),
        (["ARGS=trainer.n_gpus_per_node=64"], "trainer.n_gpus_per_node=64: must be at most 4: "),
        (["SEED=2", "--", "ARGS=trainer.n_gpu=2"], "ARGS=trainer.n_gpu=2: Could not override"),
    ],
)
def test_check_refuses_as_the_run_would(words, refusal, tmp_path):
    refused(["--check", *words], refusal, tmp_path)


def make(*words: str) -> subprocess.CompletedProcess:
    """``make`` as a user types it, whatever make has started these tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=REPO, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("word", ["PRECISON=fp16", "STEPS=none", "ARGS=it's"])
def test_make_refuses_before_it_sets_anything_up(word):
    done = make("run", word, "DEVICE=cpu")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[0].startswith(f"run: {word.partition('=')[0]}")


def test_make_leaves_a_linked_environment_alone(tmp_path):
    shared, checkout = tmp_path / "shared", tmp_path / "checkout"
    shared.mkdir()
    (shared / "in-use").touch()
    checkout.mkdir()
    (checkout / ".venv").symlink_to(shared)
    shutil.copy(REPO / "Makefile", checkout)
    shutil.copytree(REPO / "requirements", checkout / "requirements")
    words = ["make", "-C", checkout, "setup", "DEVICE=cpu", f"PYTHON={sys.executable}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(".venv is a link and its environment is not up to date")
    assert [path.name for path in shared.iterdir()] == ["in-use"]


def test_make_passes_every_word_on_as_it_was_typed():
    line = make("--dry-run", "run", "DEVICE=cpu", "OUT=/a b", "ARGS=x='it''s' y=[1,2] z=$$HOME").stdout.splitlines()[-1]
    words = shlex.split(line)
    assert words[2:] == ["scripts/run.py", "ARGS=x='it''s' y=[1,2] z=$HOME", "DEVICE=cpu", "OUT=/a b"]


def test_make_alone_lists_every_target_and_variable():
    text = make().stdout
    targets = re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.M)
    assert {"run", "test", "apply-patches", "lint"} < set(targets)
    assert all(f"make {target} " in text for target in set(targets) - {"python", "venvs-python", "accept", "browser"})
    assert all(f"  {name} " in text for name in VARIABLES)
