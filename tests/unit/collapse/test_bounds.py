"""The bounds of ``verl_precision.sequence_weights`` are those of the recorded runs."""

import pytest

from verl_precision.collapse.outcomes import read_table
from verl_precision.paths import REPO
from verl_precision.sequence_weights import TRUNCATED, UNTRUNCATED, prediction

SAME = 1.05  # T·k3 of two seeds differs by less
REFERENCE = ("outcome", "truncated per answer")  # groups whose fp16 runs are the measure
RUNS = read_table(REPO / "docs/results/collapse/runs.csv")


@pytest.mark.parametrize(
    ("weighting", "bounds"), [("sequence-level weights", UNTRUNCATED), ("sequence-level weights, truncated", TRUNCATED)]
)
def test_bounds_are_those_of_the_recorded_runs(weighting, bounds):
    runs = [each for each in RUNS if each.run.weighting == weighting]
    least = min(each.last for each in runs if each.run.group in REFERENCE and each.run.precision == "fp16")
    # other lengths have 40 steps and a warm start of their own: in fp16, 256 tokens end below the reference, too
    worse = min(each.total_k3 for each in runs if each.last < least and each.run.group != "length")
    alive = max(each.total_k3 for each in runs if each.last >= each.first / 2)
    learned = max(each.total_k3 for each in runs if each.total_k3 < worse / SAME)
    collapsed = min(each.total_k3 for each in runs if each.total_k3 > alive * SAME)
    assert (f"{learned:.2g}", f"{collapsed:.2g}") == tuple(f"{bound:.2g}" for bound in bounds)


def test_prediction_needs_the_whole_interval_on_one_side():
    learned, collapsed = UNTRUNCATED
    assert prediction(0, learned) == "hold" and prediction(collapsed, 9) == "do not hold"
    for interval in ((0.1, learned + 0.01), (collapsed - 0.1, 9)):
        assert prediction(*interval) == "may or may not hold"
