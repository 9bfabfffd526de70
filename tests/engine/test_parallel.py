"""fp16 under sequence parallelism, dynamic batches, offloading and three ranks, by verl's FSDP engine on gloo ranks.

On a CPU, offloading copies nothing: the tests show that verl's functions and the loss scaler work in this order, not
that a copy between devices is right.
"""

import pytest
from support.engine_rows import by_case

SCALER = {"loss_scale": [1024.0, 2048.0, 1024.0, 1024.0], "skipped_steps": [0.0, 0.0, 1.0, 0.0]}


def taken(values: list[float | None]) -> list[float]:
    """Return the values of a metric in the steps that were not skipped."""
    return [value for value in values if value is not None]


@by_case("layouts", fsdp="quick")
def test_layout_changes_neither_the_step_nor_the_loss_scale(patched, row):
    first, second = patched
    plain = first["plain"]
    assert len(taken(plain["grad_norm"])) == 3
    for rank in patched:
        assert all(outcome["skipped_to_the_bit"] for outcome in rank.values())
    for name, outcome in first.items():
        assert {metric: outcome[metric] for metric in SCALER} == SCALER, name
        if name.startswith("offload"):
            assert outcome == second[name] == plain, name
        for metric in ("loss", "grad_norm"):  # another order of fp16 rounding
            assert taken(outcome[metric]) == pytest.approx(taken(plain[metric]), rel=2e-4), name
    assert first["Ulysses"]["grad_norm"] != first["packed"]["grad_norm"], "its ranks must reduce parts of a sequence"
    assert second["Ulysses"]["loss"] == []
    assert ("offload_policy" in first) == (row.strategy == "fsdp2")


@pytest.mark.slow
@by_case("three_ranks", ranks=3)
def test_three_ranks_agree_on_a_skip_of_one(patched, row):
    for rank in patched:
        for name in ("float16", "uneven"):
            assert rank[name]["skipped_to_the_bit"] and {metric: rank[name][metric] for metric in SCALER} == SCALER
            assert rank[name]["grad_norm"] == patched[0][name]["grad_norm"], "ranks clip by different norms"
        assert rank["float16"]["grad_norm"][:2] == pytest.approx(rank["float32"]["grad_norm"][:2], rel=2e-3)
    assert (len({rank["elements"] for rank in patched}) > 1) == (row.strategy == "fsdp2")  # FSDP1 pads its shards
