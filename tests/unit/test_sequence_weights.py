"""The bounds of ``verl_precision.sequence_weights`` are those of the recorded runs."""

import csv

import pytest

from verl_precision.paths import REPO
from verl_precision.sequence_weights import TRUNCATED, UNTRUNCATED, prediction

SAME = 1.05  # T·k3 of two seeds differs by less
REFERENCE = ("outcome", "truncated per answer")  # groups whose fp16 runs are the reference


def weighting(run: dict) -> str:
    """Return the kind of sequence-level weights of a run; "" without them or with another learning rate."""
    if run["algo"] != "pg_is" or "rollout_is=token" in run["args"] or "optim.lr=" in run["args"]:
        return ""
    return "truncated" if "rollout_is_threshold=" in run["args"] else "untruncated"


def recorded_runs(kind: str) -> list[dict]:
    """Return the recorded runs with these weights."""
    with (REPO / "docs/results/collapse/runs.csv").open(newline="") as content:
        rows = [
            row | {name: float(row[name]) for name in ("first", "last", "total_k3")} for row in csv.DictReader(content)
        ]
    return [row for row in rows if weighting(row) == kind]


@pytest.mark.parametrize(("kind", "bounds"), [("untruncated", UNTRUNCATED), ("truncated", TRUNCATED)])
def test_bounds_are_those_of_the_recorded_runs(kind, bounds):
    runs = recorded_runs(kind)
    least = min(each["last"] for each in runs if each["group"] in REFERENCE and each["precision"] == "fp16")
    # other lengths have 40 steps and a different warm start: in fp16, 256 tokens end below the reference, too
    worse = min(each["total_k3"] for each in runs if each["last"] < least and each["group"] != "length")
    alive = max(each["total_k3"] for each in runs if each["last"] >= each["first"] / 2)
    learned = max(each["total_k3"] for each in runs if each["total_k3"] < worse / SAME)
    collapsed = min(each["total_k3"] for each in runs if each["total_k3"] > alive * SAME)
    assert (f"{learned:.2g}", f"{collapsed:.2g}") == tuple(f"{bound:.2g}" for bound in bounds)


def test_prediction_needs_the_whole_interval_on_one_side():
    learned, collapsed = UNTRUNCATED
    assert prediction(0, learned) == "hold" and prediction(collapsed, 9) == "do not hold"
    for interval in ((0.1, learned + 0.01), (collapsed - 0.1, 9)):
        assert prediction(*interval) == "may or may not hold"
