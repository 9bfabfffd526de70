"""The command ``scripts/run.py``, and its use by ``make run``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lib.files import write_json
from lib.paths import REPO
from lib.run.folder import start_record
from lib.run.job import parse_job


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
