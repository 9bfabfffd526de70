"""``make verify-gpu DEVICE=cpu`` runs every stage in small, so that it works when it first meets a GPU."""

import json
import subprocess
from pathlib import Path

import pytest

from verl_precision.paths import PROGRAM
from verl_precision.verify.steps import STEPS

pytestmark = pytest.mark.slow  # four minutes; tests/unit/verify tests the steps
# Of bench.py's parts one: tests/unit/bench runs them all.
QUICK = ("hardware", "doctor", "scaler", "engine", "training", "sanity-fp16", "bench-amp")


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """The folder of the report, which both tests complete."""
    return tmp_path_factory.mktemp("verify-gpu")


@pytest.mark.parametrize("only", [pytest.param(QUICK, id="some"), pytest.param((), id="all")])
def test_every_stage_passes_in_small(only, out):
    known = set(json.loads((out / "cpu.json").read_text())["steps"]) if (out / "cpu.json").exists() else set()
    words = ["--device=cpu", f"--only={' '.join(only)}", f"--out={out}", f"--work={out / 'work'}"]
    command = [*PROGRAM, "verify-gpu", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    steps = json.loads((out / "cpu.json").read_text())["steps"]
    wanted = set(only) or {step.name for step in STEPS}
    assert {name: result.get("reason") for name, result in steps.items()} == dict.fromkeys(wanted | known)
    # The whole verification resumes: it runs only the others.
    assert done.stdout.count(" passed in ") == len(wanted - (set() if only else known))

    tests = steps["engine"]["values"]["tests"]
    assert sum(test["outcome"] == "passed" for test in tests.values()) == 18
    jobs = [result["values"] for result in steps.values() if result["stage"] == "job"]
    assert all(job["k3"] < 1e-3 and job["s_per_step"] > 0 and job["answer_tokens"] > 7 for job in jobs)
    report = (out / "cpu.md").read_text()
    assert all(
        f"]({file})" in report and (out / file).exists() for result in steps.values() for file in result["files"]
    )
