"""FlowRL's worker under FSDP1 and FSDP2 on two gloo ranks; flowrl_cases.py contains the cases."""

import pytest
from support.engine_rows import by_case


@by_case("head_dtypes", fsdp="quick")
def test_head_computes_in_fp32_under_fp16_autocast(patched):
    for rank in patched:
        assert rank["head"] == [["float32"] * 4] * 3, "weights, input, output or gradient"
        assert rank["adam"] == "float32"
        assert rank["evaluated"] == ["log_probs", "metrics"], "log Z is learned only in training"


def close(errors: dict[str, float], head: bool = True, within: float = 1e-3) -> bool:
    return set(errors) == {"means", "trunk", *(["head"] if head else [])} and max(errors.values()) < within


@by_case("beside_plain_torch")
def test_loss_metrics_and_gradients_match_plain_torch(patched):
    """Over the rows of both ranks, so normalization and the average of the head's gradients are global."""
    for rank in patched:
        errors = dict(rank["errors"])
        assert close(errors.pop("fp16"), within=0.3), "terms of the head's gradient cancel: 0.1 is rounding"
        assert len(errors) == 4 and all(map(close, errors.values())), errors
        assert rank["detached"] > 1e-2, "the effect of log Z on the trunk must exceed ten times the tolerance"


@by_case("variants")
def test_every_variant_matches_plain_torch(patched):
    for rank in patched:
        assert len(rank["errors"]) == 12 and not rank["head"]
        for name, errors in rank["errors"].items():
            assert close(errors, head=not name.startswith("log_z=")), (name, errors)


@by_case("clipped")
def test_gradient_of_the_head_is_clipped_by_its_own_setting(patched):
    for rank in patched:
        assert rank["reported"] > 1e-2 and rank["applied"] == pytest.approx(1e-3, rel=1e-3)


@by_case("clipped")
def test_heads_stay_identical_on_all_ranks(patched):
    for rank in patched:
        assert rank["same"] and rank["moved"]


@pytest.mark.parametrize("where", ["trunk", "head", "both"])
@by_case("overflows_fp16", "overflows_bf16")
def test_overflow_skips_trunk_and_head_on_all_ranks(patched, row, where):
    for rank in patched:
        fault = rank[where]
        assert fault["unchanged"], "weights or Adam state of trunk or head moved"
        assert fault["schedules"] and fault["metrics"] == {"grad_norm": None, "skipped_steps": 1.0}
        assert (fault["head_norm"] is None) == (where != "trunk")
        before, after = fault["scale"]
        assert after == before / 2 if row.case == "overflows_fp16" else before is after is None
        assert fault["moves_on"] and fault["next_step"], "the next step differs"


@by_case("resume", fsdp="quick")
def test_resumed_run_is_bit_exact(patched):
    """Bit for bit: trunk, head, both optimizers, both schedules, the scale, and the head's dropout."""
    for rank in patched:
        assert rank["loaded"] and rank["moved"] and rank["steps"]


@by_case("resume", fsdp="quick")
def test_head_obeys_load_contents(patched):
    """With only the weights: no Adam state, and both schedules restart."""
    for rank in patched:
        assert rank["weights_alone"] == {"head": True, "adam": 0, "updates": [0, 0]}


@by_case("resume", fsdp="quick")
def test_checkpoint_with_another_head_or_none_is_refused_on_all_ranks(patched):
    for rank in patched:
        file = rank["file"]
        width = f"{file}: its log Z head has hidden_size=64, but this model has 128"
        missing = f"{file} is missing: only actor_rollout_ref.actor.flowrl.log_z=learned saves it"
        assert rank["width"] == [width, True] and rank["missing"] == [missing, True]


@by_case("resume", fsdp="quick")
def test_head_has_a_file_of_its_own_and_is_neither_synced_nor_exported(patched, row):
    assert all(rank["there"] for rank in patched) and patched[0]["listed"], "its file must be in the manifest"
    assert all(rank["rollout"] and rank["state_dict"] for rank in patched)
    if row.strategy == "fsdp2":  # torch cannot gather FSDP1's full state dict from CPU parameters
        assert patched[0]["export"] and patched[0]["merged"]


@by_case("lora")
def test_log_z_reaches_lora_adapters(patched):
    for rank in patched:
        assert rank["log_z"][0] == pytest.approx(rank["log_z"][1], rel=1e-4)
        assert rank["losses"] == pytest.approx([rank["losses"][2]] * 3, rel=1e-5)
        with_log_z, detached = rank["grad_norms"]
        assert with_log_z != pytest.approx(detached, rel=1e-3)
