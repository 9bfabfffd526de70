"""``make collapse`` in short: the same language model in real verl, trained in bf16 and in fp16."""

import subprocess

import pytest

from verl_precision.collapse.grid import GridRun
from verl_precision.collapse.outcomes import read_outcome
from verl_precision.paths import PROGRAM

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("exclusive")]
STEPS = 30


def test_fp16_learns_where_bf16_collapses(tmp_path):
    """In the runs of docs/results/collapse, steps 21 to 30 have an accuracy of 0 in bf16 and of .67 or more in fp16."""
    command = [*PROGRAM, "collapse", "--device=cpu", f"--steps={STEPS}", f"--out={tmp_path}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    runs = {regime: GridRun("collapse", regime, 1, steps=STEPS) for regime in ("bf16", "fp16")}
    outcomes = {regime: read_outcome(run, tmp_path / run.name) for regime, run in runs.items()}
    assert outcomes["bf16"].last < outcomes["bf16"].first / 2 and outcomes["fp16"].last > outcomes["fp16"].first
    assert outcomes["bf16"].total_k3 > 20 * outcomes["fp16"].total_k3
    assert "collapsed in bf16" in done.stdout and "rose in fp16" in done.stdout
    assert (tmp_path / "collapse.png").stat().st_size > 10_000
