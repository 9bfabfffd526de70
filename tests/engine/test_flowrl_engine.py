"""FlowRL's worker under FSDP1 and FSDP2 on two gloo ranks; flowrl_cases.py runs the cases."""

import math
from pathlib import Path

import pytest

pytestmark = pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])


@pytest.fixture(scope="module")
def outcome(run_ranks):
    """Return ``outcome(strategy, case)``: the case's result on each rank; all cases of a strategy run in one job."""
    done: dict[str, list[dict]] = {}

    def of(strategy: str, case: str) -> list:
        if strategy not in done:
            done[strategy] = run_ranks("patched", Path(__file__).with_name("flowrl_cases.py"), strategy)
        return [rank[case] for rank in done[strategy]]

    return of


def test_the_head_computes_in_fp32_under_fp16_autocast(outcome, strategy):
    for rank in outcome(strategy, "dtypes"):
        assert rank["log_z"] == rank["adam"] == "float32"
        for layer in ("head 0", "head 4", "head 8"):
            assert rank[layer] == ["float32"] * 4, "weights, input, output or gradient"
        assert rank["trunk"][1:] == ["float16"] * 3  # weights are fp32 masters under FSDP2, fp16 copies under FSDP1


def close(errors: dict[str, float], head: bool = True, within: float = 1e-3) -> bool:
    return set(errors) == {"means", "trunk", *(["head"] if head else [])} and max(errors.values()) < within


def test_loss_metrics_and_gradients_match_plain_torch_in_every_layout(outcome, strategy):
    """Over the rows of both ranks, so normalization and the average of the head's gradients are global."""
    for rank in outcome(strategy, "beside_plain_torch"):
        errors = dict(rank["errors"])
        assert close(errors.pop("fp16"), within=0.3), "terms of the head's gradient cancel: 0.1 is rounding"
        assert len(errors) == 9 and all(map(close, errors.values())), errors


def test_log_z_reaches_the_trunk(outcome, strategy):
    for rank in outcome(strategy, "beside_plain_torch"):
        assert rank["detached"] > 1e-2, "the effect must exceed ten times the tolerance"


def test_every_variant_matches_plain_torch(outcome, strategy):
    for rank in outcome(strategy, "variants"):
        assert len(rank["errors"]) == 11 and not rank["head"]
        for name, errors in rank["errors"].items():
            assert close(errors, head=not name.startswith("log_z=")), (name, errors)


def test_padding_rows_contribute_nothing(outcome, strategy):
    for rank in outcome(strategy, "padding"):
        assert set(rank) == {"some", "all of rank 1"} and all(map(close, rank.values())), rank


def test_each_mini_batch_is_normalised_by_its_own_rows(outcome, strategy):
    for rank in outcome(strategy, "mini_batches"):
        assert rank["losses"][0] == rank["losses"][1] and rank["alike"]
        assert rank["first"][0] == pytest.approx(rank["first"][1], rel=1e-5)


def test_initial_loss_depends_on_the_advantages_alone(outcome, strategy):
    for rank in outcome(strategy, "at_the_start"):
        for loss in rank["losses"].values():  # two of four groups have answers that differ
            assert loss == pytest.approx(225 * 7 / 8 * 2 / 4, rel=1e-4)


def test_evaluation_returns_the_models_log_probs_without_log_z(outcome, strategy):
    for rank in outcome(strategy, "at_the_start"):
        assert rank["infer"] == ["log_probs", "metrics"] and rank["log_prob_error"] < 1e-4


def test_heads_stay_identical_on_all_ranks(outcome, strategy):
    for rank in outcome(strategy, "in_sync"):
        assert rank["same"] and rank["moved"] and all(map(math.isfinite, rank["norms"]))


def test_gradient_of_the_head_is_clipped_by_its_own_setting(outcome, strategy):
    for rank in outcome(strategy, "clipped"):
        assert rank["reported"] > 1e-2 and rank["applied"] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("where", ["trunk", "head", "both"])
def test_overflow_skips_trunk_and_head_on_all_ranks(outcome, strategy, dtype, where):
    for rank in outcome(strategy, f"overflows_{dtype}"):
        fault = rank[where]
        assert fault["unchanged"], "weights or Adam state of trunk or head moved"
        assert fault["schedules"] and fault["metrics"] == {"grad_norm": None, "skipped_steps": 1.0}
        assert (fault["head_norm"] is None) == (where != "trunk")
        before, after = fault["scale"]
        assert after == before / 2 if dtype == "fp16" else before is after is None
        assert fault["moves_on"] and fault["next_step"], "the next step differs"


def test_resumed_run_is_bit_exact(outcome, strategy):
    """Bit for bit: trunk, head, both optimizers, both schedules, the scale, and the head's dropout."""
    for rank in outcome(strategy, "resume"):
        assert rank["loaded"] and rank["moved"] and rank["steps"]


def test_head_obeys_load_contents(outcome, strategy):
    """With weights alone: no Adam state, and both schedules restart."""
    for rank in outcome(strategy, "resume"):
        assert rank["weights_alone"] == {"head": True, "adam": 0, "updates": [0, 0]}


def test_manifest_lists_the_heads_file(outcome, strategy):
    ranks = outcome(strategy, "resume")
    assert all(rank["there"] for rank in ranks) and ranks[0]["listed"]


def test_checkpoint_with_another_head_or_none_is_refused_on_all_ranks(outcome, strategy):
    for rank in outcome(strategy, "resume"):
        file = rank["file"]
        width = f"{file}: its log Z head has hidden_size=64, but this model has 128"
        missing = f"{file} is missing: only actor_rollout_ref.actor.flowrl.log_z=learned saves it"
        assert rank["width"] == [width, True] and rank["missing"] == [missing, True]


def test_head_is_neither_synced_nor_exported(outcome, strategy):
    ranks = outcome(strategy, "resume")
    assert all(rank["rollout"] and rank["state_dict"] for rank in ranks)
    if strategy == "fsdp2":  # torch cannot gather FSDP1's full state dict from CPU parameters
        assert ranks[0]["export"] and ranks[0]["merged"]


def test_log_z_reaches_lora_adapters(outcome, strategy):
    for rank in outcome(strategy, "lora"):
        assert rank["log_z"][0] == pytest.approx(rank["log_z"][1], rel=1e-4)
        assert rank["losses"] == pytest.approx([rank["losses"][2]] * 3, rel=1e-5)
        with_log_z, detached = rank["grad_norms"]
        assert with_log_z != pytest.approx(detached, rel=1e-3)
