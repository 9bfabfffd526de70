"""The bounds of ``lib.sequence_weights`` are those of the recorded runs."""

import pytest

from lib.collapse.outcomes import read_table
from lib.paths import REPO
from lib.sequence_weights import TRUNCATED, UNTRUNCATED, prediction

RUNS = read_table(REPO / "docs/results/collapse/runs.csv")


@pytest.mark.parametrize(
    ("weighting", "bounds"), [("weights per answer", UNTRUNCATED), ("weights per answer, truncated", TRUNCATED)]
)
def test_bounds_are_those_of_the_recorded_runs(weighting, bounds):
    runs = sorted((each for each in RUNS if each.run.weighting == weighting), key=lambda each: each.total_k3)
    fates = [
        "learned" if each.last > each.first else "collapsed" if each.last < each.first / 2 else "" for each in runs
    ]
    at = next(index for index, fate in enumerate(fates) if fate != "learned")
    assert f"{runs[at - 1].total_k3:.2g}" == f"{bounds.learned:g}", "the largest below which every run learned"
    after = max(index for index, fate in enumerate(fates) if fate != "collapsed")
    assert f"{runs[after + 1].total_k3:.2g}" == f"{bounds.collapsed:.2g}".removesuffix(".0"), "all above collapsed"


def test_prediction_needs_the_whole_interval_on_one_side():
    learned, collapsed = UNTRUNCATED
    assert [prediction(*pair) for pair in ((0, learned), (collapsed, 9), (0.1, learned + 0.01), (1.9, 9))] == [
        "hold",
        "do not hold",
        "may or may not hold",
        "may or may not hold",
    ]
