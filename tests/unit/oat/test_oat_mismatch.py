"""OAT's mismatch module by itself against a computation by hand; requires only torch."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.oat_modules import mismatch


@dataclass
class Args(mismatch.MismatchArgs):
    tis_c: float | None = None
    reinforce_update: bool = False


# Two responses, of two tokens and of one; values outside the mask must have no effect.
LOGPS = torch.tensor([[-1.0, -2.0, 9.0], [7.0, -0.5, math.nan]])
ACTOR = torch.tensor([[-1.5, -1.8, 0.0], [0.0, -2.5, 0.0]])
MASK = torch.tensor([[True, True, False], [False, True, False]])
LOSS = torch.tensor([[1.0, 2.0, 0.0], [0.0, 4.0, 0.0]])


def weighed(**given) -> list[float]:
    return mismatch.reweigh(Args(**given), LOSS, LOGPS, ACTOR, MASK)[MASK].tolist()


def test_loss_without_weights_is_returned_unchanged():
    assert mismatch.reweigh(Args(), LOSS, LOGPS, ACTOR, MASK) is LOSS


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        ({"rollout_is": "token", "rollout_is_threshold": math.inf}, [math.exp(0.5), math.exp(-0.2), math.exp(2.0)]),
        ({"rollout_is": "token"}, [math.exp(0.5), math.exp(-0.2), 2.0]),
        ({"rollout_is": "sequence"}, [math.exp(0.3), math.exp(0.3), 2.0]),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": 3.0}, [1.0, 1.0, 0.0]),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": 8.0}, [1.0, 1.0, 1.0]),
        (
            {"rollout_is": "sequence", "rollout_rs": "sequence", "rollout_rs_threshold": 3.0},
            [math.exp(0.3), math.exp(0.3), 0.0],
        ),
    ],
)
def test_loss_is_multiplied_by_the_weights(given, weights):
    expected = [loss * weight for loss, weight in zip(LOSS[MASK].tolist(), weights, strict=True)]
    assert weighed(**given) == pytest.approx(expected, rel=1e-6)


def test_weight_is_clamped_to_finite_values():
    """An inf times a zero advantage, or times the zero of a masked response, would be NaN."""
    logps, actor, mask = torch.tensor([[0.0]]), torch.tensor([[-200.0]]), torch.tensor([[True]])
    for loss in (0.0, 1.0):
        for level in ("token", "sequence"):
            args = Args(rollout_is=level, rollout_is_threshold=math.inf)
            assert mismatch.reweigh(args, torch.tensor([[loss]]), logps, actor, mask).item() == pytest.approx(
                loss * math.exp(20)
            )
    args = Args(rollout_rs="sequence", rollout_rs_threshold=2.0)
    loss = torch.tensor([[math.inf]], requires_grad=True)
    left_out = mismatch.reweigh(args, loss, logps, actor, mask)
    left_out.sum().backward()
    assert left_out.item() == 0.0 and loss.grad.item() == 0.0


def test_policy_gradient_treats_importance_weight_as_constant():
    """d/dtheta of -A w log pi is -A w: no gradient flows through the weight."""
    logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    actor, advantage = torch.tensor([[-1.5, -1.8]]), 3.0
    args = Args(reinforce_update=True, rollout_is="sequence", rollout_is_threshold=math.inf)
    mismatch.reweigh(args, -advantage * logps, logps, actor, torch.ones(1, 2, dtype=torch.bool)).sum().backward()
    assert logps.grad.tolist()[0] == pytest.approx([-advantage * math.exp(0.3)] * 2)


def by_hand(logps: list[float], actor: list[float]) -> dict[str, float]:
    diffs = [abs(math.exp(a) - math.exp(b)) for a, b in zip(actor, logps, strict=True)]
    ratios = [b - a for a, b in zip(actor, logps, strict=True)]
    return {
        "rollout_probs_diff_mean": sum(diffs) / len(diffs),
        "rollout_probs_diff_max": max(diffs),
        "rollout_k3_kl": sum(math.exp(r) - 1 - r for r in ratios) / len(ratios),
        "kl_sample_train_v1": -sum(ratios) / len(ratios),
        "kl_sample_train_v2": 0.5 * sum(r * r for r in ratios) / len(ratios),
    }


def test_metrics_of_one_rank_match_those_by_hand():
    found = mismatch.mismatch_metrics(Args(), LOGPS, ACTOR, MASK)
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        by_hand([-1.0, -2.0, -0.5], [-1.5, -1.8, -2.5]), rel=1e-5
    )


def test_metrics_report_mean_weight_and_masked_fraction():
    for threshold, left_out in ((8.0, 0.0), (3.0, 1 / 3), (1.2, 1.0)):
        args = Args(rollout_is="sequence", rollout_rs="sequence", rollout_rs_threshold=threshold)
        found = mismatch.mismatch_metrics(args, LOGPS, ACTOR, MASK)
        assert found["rollout_is_mean"].item() == pytest.approx((2 * math.exp(0.3) + 2.0) / 3)
        assert found["rollout_rs_masked_fraction"].item() == pytest.approx(left_out)


def rank(of: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=of, world_size=2)
    found = mismatch.mismatch_metrics(Args(), LOGPS[of : of + 1], ACTOR[of : of + 1], MASK[of : of + 1])
    torch.save({name: value.item() for name, value in found.items()}, f"{folder}/{of}")
    dist.destroy_process_group()


@pytest.mark.subprocess
def test_metrics_of_two_ranks_are_averaged_over_tokens(tmp_path):
    mp.spawn(rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / str(of)) for of in range(2))
    of_all = by_hand([-1.0, -2.0, -0.5], [-1.5, -1.8, -2.5])
    for name in ("rollout_probs_diff_mean", "rollout_probs_diff_max", "rollout_k3_kl"):
        assert first[name] == second[name] == pytest.approx(of_all[name], rel=1e-5)
    # OAT computes its own metrics per rank and averages them.
    assert first["kl_sample_train_v1"] == pytest.approx(-0.15) and second["kl_sample_train_v1"] == pytest.approx(-2.0)


def test_rollout_logps_are_aligned_with_the_mask():
    found = mismatch.rollout_logps([[-1.5, -1.8], [-2.5]], MASK)
    assert torch.equal(found, ACTOR)
    found = mismatch.rollout_logps([None, None], MASK)  # a dry run
    assert found[MASK].isnan().all() and (found[~MASK] == 0).all()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rollout_is": "tokens"}, ["rollout_is=tokens", "token, sequence or None"]),
        ({"rollout_rs": "token", "rollout_rs_threshold": 2.0}, ["rollout_rs=token", "sequence or None"]),
        ({"rollout_is": "token", "rollout_is_threshold": 0.0}, ["rollout_is_threshold=0.0", "positive"]),
        ({"rollout_is": "token", "rollout_is_threshold": math.nan}, ["rollout_is_threshold=nan"]),
        ({"rollout_rs": "sequence"}, ["rollout_rs=sequence", "rollout_rs_threshold=None"]),
        ({"rollout_rs_threshold": 2.0}, ["rollout_rs=None", "rollout_rs_threshold=2.0"]),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": -1.0}, ["rollout_rs_threshold=-1.0"]),
        ({"rollout_is": "token", "tis_c": 2.0}, ["rollout_is=token", "tis_c=2.0", "--tis_c None"]),
    ],
)
def test_invalid_settings_are_refused_in_one_line(given, words):
    with pytest.raises(ValueError) as refused:
        mismatch.check_mismatch(Args(**given))
    message = str(refused.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_valid_settings_are_accepted():
    mismatch.check_mismatch(Args(tis_c=2.0))
    mismatch.check_mismatch(Args(tis_c=2.0, rollout_is="sequence", reinforce_update=True))  # tis_c is not read there
    mismatch.check_mismatch(Args(tis_c=2.0, rollout_rs="sequence", rollout_rs_threshold=2.0))  # a mask is no weight
    mismatch.check_mismatch(object())  # DPO's arguments have no such keys
