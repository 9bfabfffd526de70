"""``make collapse`` in short: the same language model in real verl, trained in bf16 and in fp16."""

import subprocess

import pytest

from verl_precision.collapse.outcomes import first_and_last, total_k3
from verl_precision.paths import PROGRAM
from verl_precision.report.readers.dispatch import read

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("exclusive")]
STEPS = 30


def test_fp16_learns_where_bf16_collapses(tmp_path):
    """In the runs of docs/results/collapse, steps 21 to 30 have an accuracy of 0 in bf16 and of .67 or more in fp16."""
    command = [*PROGRAM, "collapse", "--device=cpu", f"--steps={STEPS}", f"--out={tmp_path}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    runs = {regime: read(regime, tmp_path / f"pg_is/{regime}-seed1") for regime in ("bf16", "fp16")}
    (bf16_first, bf16_last), (fp16_first, fp16_last) = (first_and_last(run) for run in runs.values())
    assert bf16_last < bf16_first / 2 and fp16_last > fp16_first
    assert total_k3(runs["bf16"]) > 20 * total_k3(runs["fp16"])
    assert "collapsed in bf16" in done.stdout and "rose in fp16" in done.stdout
    assert (tmp_path / "report/figures/k3.png").stat().st_size > 10_000
