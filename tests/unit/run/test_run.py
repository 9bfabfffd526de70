"""The command ``scripts/run.py``, and its use by ``make run``."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import run
from lib.errors import Refused
from lib.files import write_json
from lib.paths import REPO
from lib.run import train
from lib.run.folder import start_record
from lib.run.job import Job, compose, parse_job
from lib.run.start_checks import check_start


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
    """Assert that the command refuses the words in one line with this beginning and leaves the folder empty."""
    done = command("DEVICE=cpu", f"OUT={folder / 'out'}", *words)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"run: {begin}")
    assert list(folder.iterdir()) == []


SANITY = ["EXPERIMENT=sanity_cpu", "DEVICE=cpu", "STEPS=40"]
REFUSED_BY_VERL = "actor_rollout_ref.actor.ppo_mini_batch_size=64"


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
        ([f"ARGS={REFUSED_BY_VERL}"], f"ARGS={REFUSED_BY_VERL}: train_batch_size (32) must be >="),
    ],
)
def test_check_refuses_as_the_run_would(words, refusal, tmp_path):
    refused(["--check", *words], refusal, tmp_path)


def test_run_on_a_cluster_is_not_compared_with_this_machine(tmp_path, monkeypatch):
    words = ["DEVICE=cpu", f"OUT={tmp_path / 'out'}", "ARGS=trainer.n_gpus_per_node=64 trainer.nnodes=2"]

    def check() -> dict:
        job = parse_job(words)
        return check_start(job, compose(job, job.out), job.out)

    with pytest.raises(Refused, match="^trainer.nnodes=2: must be 1 without RAY_ADDRESS"):
        check()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert check()["steps"] == 26


# --- a run whose training is a stub -----------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Callable[[int], tuple[int, dict]]:
    """``trained(code)``: the exit code of a run whose training ends with ``code``, and the record that this got."""
    for name in ("interrupt_on_signals", "validate"):
        monkeypatch.setattr(run, name, lambda *_: None)
    monkeypatch.setattr(Job, "generate_command", lambda _: [sys.executable, "-c", ""])

    def trained(code: int) -> tuple[int, dict]:
        records = []

        def training(job, config, out, record, log) -> tuple[int, list]:
            records.append(record)
            return code, []

        monkeypatch.setattr(train, "train", training)
        return run.run([*SANITY, f"OUT={tmp_path / 'out'}"]), records[0]

    return trained


@pytest.mark.parametrize("code", [1, 75, 130])
def test_failed_run_leaves_no_summary(code, trained, tmp_path):
    assert trained(code)[0] == code
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.parametrize(("checkpoint", "wall_s"), [(0, 0.0), (2, 100.0)])
def test_time_counts_from_the_attempts_that_left_a_checkpoint(checkpoint, wall_s, trained, tmp_path):
    out = finished(tmp_path / "out")
    (out / "summary.json").unlink()
    write_json(out / "run.json", json.loads((out / "run.json").read_text()) | {"wall_s": 100.0})
    if checkpoint:
        (out / f"checkpoints/global_step_{checkpoint}").mkdir(parents=True)
        (out / "checkpoints/latest_checkpointed_iteration.txt").write_text(str(checkpoint))
    assert trained(1)[1]["wall_s"] == wall_s
