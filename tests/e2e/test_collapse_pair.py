"""``make collapse`` in short: the same language model in real verl, trained in bf16 and in fp16."""

import subprocess
from statistics import fmean

import pytest

from verl_precision.facts.metrics import K3_KL, REWARD
from verl_precision.paths import PROGRAM, REPO
from verl_precision.report.readers import read
from verl_precision.spelling import as_options

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("exclusive")]
STEPS = 30


def test_fp16_learns_where_bf16_collapses(tmp_path):
    """In the runs of docs/results/collapse, steps 21 to 30 have an accuracy of 0 in bf16 and of .67 or more in fp16."""
    _, *words = (REPO / "configs/compare/collapse.words").read_text().splitlines()
    values = dict(word.split("=") for word in words) | {"DEVICE": "cpu", "STEPS": str(STEPS), "OUT": str(tmp_path)}
    done = subprocess.run([*PROGRAM, "compare", *as_options(values)], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    runs = {regime: read(regime, tmp_path / f"pg_is/{regime}-seed1").steps for regime in ("bf16", "fp16")}
    rewards = {regime: [steps[step][REWARD] for step in sorted(steps)] for regime, steps in runs.items()}
    first, last = ({regime: fmean(of[part]) for regime, of in rewards.items()} for part in (slice(3), slice(-10, None)))
    assert last["bf16"] < first["bf16"] / 2 and last["fp16"] > first["fp16"]
    assert runs["bf16"][1][K3_KL] > 20 * runs["fp16"][1][K3_KL]
    assert "k3 times the length of an answer is" in done.stdout
    assert (tmp_path / "pg_is/report/figures/k3.png").stat().st_size > 10_000
