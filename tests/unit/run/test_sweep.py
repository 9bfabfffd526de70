"""The same job under several regimes and seeds: plans, refusals, runs, interruptions, reports."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.report_runs import finished_run

from verl_precision.commands import compare
from verl_precision.errors import Refused
from verl_precision.files import write
from verl_precision.paths import PROGRAM
from verl_precision.run import sweep
from verl_precision.run.folder import finished as is_finished
from verl_precision.run.job import parse_job
from verl_precision.run.sweep import SweepPlan, SweepRun, plan_sweep, run_one, run_sweep
from verl_precision.spelling import as_options

# Replaces the command run: three quick steps, and in bf16 with seed 1 the second fails.
RUN = """
import json, sys
from pathlib import Path
values = dict(word.split("=", 1) for word in sys.argv[2:])
out = Path(values["--out"])
out.mkdir(parents=True, exist_ok=True)
(out / "attempts").open("a").write("1")
for step in (1, 2, 3):
    print(f"step {step}/3", flush=True)
    if step == 2 and (values["--precision"], values["--seed"]) == ("bf16", "1"):
        sys.exit("the gradient of lm_head overflows")
summary = {"wall_s": 60.0, "reward_first": 0.25, "reward_last": 0.5}
(out / "summary.json").write_text(json.dumps(summary))
"""


def finished(root: Path, regime: str = "fp16", algo: str = "grpo", seed: int = 1) -> None:
    """Create a finished run of EXPERIMENT=sanity_cpu in a comparison's folder, as ``make run`` leaves it."""
    words = ("EXPERIMENT=sanity_cpu", f"PRECISION={regime}", f"ALGO={algo}", f"SEED={seed}")
    finished_run(root / algo / f"{regime}-seed{seed}", *words, steps=40)


def test_comparison_is_planned_seed_by_seed_and_finished_runs_stay(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "find_finished", lambda runs: [run for run in runs if is_finished(run.out)])
    finished(tmp_path, "bf16", "pg_is", seed=2)
    before = sorted(tmp_path.rglob("*"))
    words = {"EXPERIMENT": "sanity_cpu", "PRECISION": "fp16 bf16", "ALGO": "grpo pg_is", "SEED": "2 7"}
    plan = plan_sweep(words | {"DEVICE": "cpu", "OUT": str(tmp_path)})
    assert [f"{run.out.relative_to(tmp_path)}" for run in plan.runs] == [
        f"{algo}/{regime}-seed{seed}" for seed in (2, 7) for algo in ("grpo", "pg_is") for regime in ("fp16", "bf16")
    ]
    assert [str(run) for run in plan.finished] == ["pg_is bf16 seed 2"]
    assert sorted(tmp_path.rglob("*")) == before, "a plan must change nothing"
    job = parse_job([f"{name}={value}" for name, value in plan.runs[3].values.items()])
    assert (job.experiment, job.name) == ("sanity_cpu", "pg_is-bf16-seed2")
    assert capsys.readouterr().out == "checking 8 runs\n"
    (run,) = plan_sweep({"DEVICE": "cpu", "RECIPE": "flowrl", "OUT": str(tmp_path)}).runs
    assert (run.objective, run.out) == ("flowrl", tmp_path / "flowrl/fp16-seed1")


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ({"PRECISION": "fp16 fp61"}, "PRECISION=fp61: must be one of bf16"),
        ({"ALGO": "grpo ppo", "RECIPE": "flowrl"}, "ALGO=ppo: RECIPE=flowrl requires grpo"),
        pytest.param({"STEPS": "30"}, "STEPS=30: .* contains a finished run of 40", marks=pytest.mark.slow),
    ],
)
def test_refusal_of_one_run_starts_none(words, refusal, tmp_path):
    finished(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Refused, match=refusal):
        plan_sweep({"DEVICE": "cpu", "EXPERIMENT": "sanity_cpu", "OUT": str(tmp_path), "SEED": "2 1"} | words)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def replaced(tmp_path, monkeypatch) -> Callable[[str], None]:
    """``replaced(script)``: let a script run instead of the command line."""

    def replaced(script: str) -> None:
        write(tmp_path / "program/__main__.py", script.encode())
        monkeypatch.setattr(sweep, "PROGRAM", (sys.executable, str(tmp_path / "program")))
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own handlers

    return replaced


def planned(root: Path) -> SweepPlan:
    """Return a comparison of four runs below ``root``."""

    def run(regime: str, seed: str) -> SweepRun:
        folder = root / f"grpo/{regime}-seed{seed}"
        return SweepRun("grpo", regime, seed, {"PRECISION": regime, "SEED": seed, "OUT": str(folder)}, folder)

    every = [run(regime, seed) for seed in ("1", "2") for regime in ("fp16", "bf16")]
    return SweepPlan("sanity_cpu", root, every, [run for run in every if is_finished(run.out)])


def test_run_is_started_in_the_folder_of_the_command(tmp_path, replaced, monkeypatch, capsys):
    """There TRAIN=data.parquet and MODEL=./folder are."""
    replaced("import os; print(os.getcwd())")
    monkeypatch.chdir(tmp_path)
    assert run_one(planned(tmp_path).runs[0]) == 0 and capsys.readouterr().out == f"  {tmp_path}\n"


def test_failed_run_is_named_and_does_not_stop_the_others(tmp_path, capsys, replaced):
    replaced(RUN)
    outcome = run_sweep(planned(tmp_path))
    assert [str(run) for run in outcome.failed] == ["grpo bf16 seed 1"] and outcome.code == 1
    labels = [("fp16", 1), ("fp16", 2), ("bf16", 2)]
    assert outcome.finished == {"grpo": [(label, tmp_path / f"grpo/{label}-seed{seed}") for label, seed in labels]}
    lines = [re.sub(r"^\[ *\d+:\d+\] ", "", line) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if not line.startswith(" ")] == [
        f"0 of 4 runs are finished, 4 left; all in {tmp_path}",
        "run 1/4: grpo fp16 seed 1",
        "grpo fp16 seed 1: reward 0.250 to 0.500 in 1:00; 3 left, about 3:00",
        "run 2/4: grpo bf16 seed 1",
        "grpo bf16 seed 1 failed with exit code 1, 2 left, about 2:00",
        "run 3/4: grpo fp16 seed 2",
        "grpo fp16 seed 2: reward 0.250 to 0.500 in 1:00; 1 left, about 1:00",
        "run 4/4: grpo bf16 seed 2",
        "grpo bf16 seed 2: reward 0.250 to 0.500 in 1:00; none left",
    ]
    assert lines.count("  step 3/3") == 3
    assert lines.count("  the gradient of lm_head overflows") == 1

    run_sweep(planned(tmp_path))
    attempts = {file.parent.name: file.read_text() for file in tmp_path.rglob("attempts")}
    once = dict.fromkeys(("fp16-seed1", "fp16-seed2", "bf16-seed2"), "1")
    assert attempts == once | {"bf16-seed1": "11"}, "finished ones are not repeated"


# Replaces the command run, which ends verl, Ray and vLLM when it is interrupted.
ENDS_IN_ORDER = """
import os, signal, sys, time
try:
    print("training", flush=True)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)
except KeyboardInterrupt:
    sys.exit("interrupted: ended in order")
"""


def test_ctrl_c_ends_the_run_in_order_and_reports_the_finished_ones(tmp_path, replaced, monkeypatch, capsys):
    """tests/e2e/test_resume.py interrupts the command itself."""
    finished(tmp_path)
    replaced(ENDS_IN_ORDER)
    monkeypatch.setattr(sweep, "plan_sweep", lambda values: planned(tmp_path))
    words = ["DEVICE=cpu", "EXPERIMENT=sanity_cpu", "PRECISION=fp16 bf16", "SEED=1 2", f"OUT={tmp_path}"]
    settings = dict(word.partition("=")[::2] for word in words)
    assert compare.main(compare.parse(words)) == 130
    text = capsys.readouterr().out
    assert "run 2/4: grpo bf16 seed 1" in text and "run 3/4" not in text
    assert "interrupted: ended in order" in text and "interrupted, 1 of 4 runs are finished" in text
    assert text.endswith(f"\nto resume:  {shlex.join([*PROGRAM, 'compare', *as_options(settings)])}\n")
    assert "fp16" in (tmp_path / "grpo/report/outcomes.csv").read_text()


@pytest.mark.slow
def test_two_regimes_are_run_and_compared(tmp_path):
    settings = {
        "DEVICE": "cpu",
        "EXPERIMENT": "sanity_cpu",
        "PRECISION": "fp16 bf16",
        "STEPS": "2",
        "OUT": f"{tmp_path}",
    }
    done = subprocess.run([*PROGRAM, "compare", *as_options(settings)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for regime, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
        summary = json.loads((tmp_path / "grpo" / f"{regime}-seed1" / "summary.json").read_text())
        assert summary["steps"] == 2 and summary["effective_dtypes"]["actor"]["compute"] == dtype
    report = tmp_path / "grpo" / "report"
    assert (report / "index.html").exists() and sorted(path.name for path in (report / "runs").iterdir())
