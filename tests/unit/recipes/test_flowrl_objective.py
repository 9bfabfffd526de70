"""FlowRL's objective against its formulas, evaluated row by row in fp64, and the mean that log Z is computed from."""

import math

import pytest
import torch

from recipes.flowrl.objective import group_log_z, importance_weights, trajectory_balance
from recipes.flowrl.partition import mean_over_prompts

BETA, ROWS, TOKENS = 15.0, 6, 7
clips = pytest.mark.parametrize("clip", [None, (0.8, 1.28), (0.0, 1.1), (0.0, 10.0)], ids=str)
levels = pytest.mark.parametrize("level", ["sequence", "token", "none"])
means_and_sums = pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
# Lengths differ, and the mask of the last row has a hole, as in an answer that contains a tool's output.
LENGTHS = [7, 1, 4, 6, 3, 5]


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]
    mask[-1, 2] = False
    log_prob = torch.randn(ROWS, TOKENS, vocabulary := 5).log_softmax(-1)[..., vocabulary // 2]
    return {
        "log_prob": log_prob,
        "old_log_prob": log_prob + 0.2 * torch.randn(ROWS, TOKENS),
        "anchor_log_prob": log_prob + 0.2 * torch.randn(ROWS, TOKENS),
        "reward": torch.randn(ROWS) / 10,
        "log_z": torch.randn(ROWS),
        "mask": mask,
    }


def gradients(batch, **settings) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the losses ``(rows,)``, and the gradients of their sum with respect to ``log_prob`` and ``log_z``."""
    leaves = [batch[name].clone().requires_grad_() for name in ("log_prob", "log_z")]
    losses, _ = trajectory_balance(
        **batch | dict(zip(("log_prob", "log_z"), leaves, strict=True)), beta=BETA, **settings
    )
    return losses.detach(), *torch.autograd.grad(losses.sum(), leaves)


def by_formula(batch, level, clip, mean=True, rollout_weights=None):
    """Return what :func:`gradients` does, in fp64: of ``−2β·A·(Σ w_t·log π_t/|y| + w·log Z)`` with constant A and w."""
    batch = {name: value.double() for name, value in batch.items()}
    log_prob, log_z = (batch[name].clone().requires_grad_() for name in ("log_prob", "log_z"))
    losses, surrogate, average = [], 0.0, torch.mean if mean else torch.sum
    for row, at in enumerate(batch["mask"].bool()):
        with torch.no_grad():
            ratio = (log_prob - batch["old_log_prob"])[row, at]
            ratio = {"sequence": ratio.sum().expand(len(ratio)), "token": ratio, "none": 0 * ratio}[level]
            weights = ratio.exp().clamp(*(clip or (0.0, math.exp(20))))
            if rollout_weights is not None:
                weights = weights * rollout_weights[row, at].double()
            drift = average((log_prob - batch["anchor_log_prob"])[row, at])
            advantage = batch["reward"][row] - (log_z[row] + drift) / BETA
        tokens = average(weights * log_prob[row, at])
        surrogate = surrogate - 2 * BETA * advantage * (tokens + weights.mean() * log_z[row])
        losses.append(weights.mean() * (BETA * advantage) ** 2)
    return torch.stack(losses), *torch.autograd.grad(surrogate, (log_prob, log_z))


def assert_equal(got, wanted, tolerance=1e-6):
    """Compare to within ``tolerance`` of the largest element."""
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance * other.abs().max().item())


@pytest.mark.parametrize("width", [0, 1, TOKENS], ids=["no rollout weights", "of sequences", "of tokens"])
@means_and_sums
@clips
@levels
def test_loss_and_gradient_match_the_advantage_formula(batch, level, clip, mean, width):
    weights = 0.5 + torch.rand(ROWS, width).expand(ROWS, TOKENS) if width else None
    got = gradients(batch, level=level, clip=clip, length_normalization=mean, rollout_weights=weights)
    assert_equal(got, by_formula(batch, level, clip, mean, weights))


def test_metrics_match_their_definitions(batch):
    _, metrics = trajectory_balance(**batch, beta=BETA, level="token", clip=(0.8, 1.28))
    losses, *_ = by_formula(batch, "token", (0.8, 1.28))
    ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()
    clipped = ((ratio < 0.8) | (ratio > 1.28)) & batch["mask"]
    assert_equal([metrics["clipped"]], [clipped.sum(-1) / batch["mask"].sum(-1)])
    assert_equal([metrics["weight"] * metrics["delta_square"]], [losses])
    for name in ("weight", "delta"):
        assert_equal([metrics[name] ** 2], [metrics[f"{name}_square"]])
    assert 0 < metrics["clipped"].sum() < ROWS and torch.equal(metrics["log_z"], batch["log_z"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("log_weight", [200.0, -200.0])
@clips
@levels
def test_extreme_weights_stay_finite(batch, level, clip, log_weight, dtype):
    batch["old_log_prob"] = batch["log_prob"] - (log_weight if level == "token" else log_weight / 4)
    half = {name: value if name == "mask" else value.to(dtype) for name, value in batch.items()}
    losses, metrics = trajectory_balance(**half, beta=BETA, level=level, clip=clip)
    weights, clipped = importance_weights(half["log_prob"], half["old_log_prob"], half["mask"], level, clip)
    # Gradients in fp16 end at 65504: take them with respect to the fp32 inputs of the trainer's loss.
    slopes = gradients(half | {name: batch[name] for name in ("log_prob", "log_z")}, level=level, clip=clip)
    for tensor in (losses, weights, *metrics.values(), *slopes):
        assert tensor.dtype == torch.float32 and torch.isfinite(tensor).all()
    for tensor in (losses, weights, *slopes, metrics["weight_square"]):
        assert (tensor != 0).any()
    least, largest = clip or (0.0, math.inf)
    edge = min(largest, math.exp(20)) if log_weight > 0 else max(least, math.exp(-20))
    assert weights[0, 0] == pytest.approx(1.0 if level == "none" else edge, rel=1e-6)
    assert clipped[0, 0] == (level != "none")


def test_half_precision_inputs_are_subtracted_in_fp32():
    """−9.0078125 − 0.0009765625 is not representable in fp16; the ratio must still be exact."""
    high, low = (torch.full((1, 1), value, dtype=torch.float16) for value in (9.0078125, -0.0009765625))
    exact, zero, mask = 9.0078125 + 0.0009765625, torch.zeros(1), torch.ones(1, 1).bool()
    weights, _ = importance_weights(high, low, mask, "token", None)
    _, metrics = trajectory_balance(high, high, low, zero, zero, mask, beta=1.0)
    log_z = group_log_z(high, low, zero, mask, zero.long(), beta=1.0)
    assert weights.item() == pytest.approx(math.exp(exact), rel=1e-6) and metrics["delta"] == -log_z == exact


@pytest.mark.parametrize("outside", [math.nan, math.inf, -math.inf, 1e38])
@means_and_sums
@levels
def test_values_outside_the_mask_have_no_effect(batch, level, mean, outside):
    weights = 0.5 + torch.rand(ROWS, TOKENS)
    batch["mask"][3] = False  # a row without tokens has no effect either
    settings = {"level": level, "clip": (0.8, 1.28), "length_normalization": mean}
    wanted = gradients(batch, **settings, rollout_weights=weights)
    assert wanted[0][3] == wanted[2][3] == 0 and not wanted[1][~batch["mask"]].any()
    group = torch.tensor([0, 0, 1, 1, 1, 0])
    inputs = batch["log_prob"], batch["anchor_log_prob"], batch["reward"], batch["mask"], group
    log_z = group_log_z(*inputs, beta=BETA, length_normalization=mean)
    for spoilt in (weights, batch["log_prob"], batch["old_log_prob"], batch["anchor_log_prob"]):
        spoilt[~batch["mask"]] = outside
        batch["reward"][3] = batch["log_z"][3] = outside
        got = gradients(batch, **settings, rollout_weights=weights)
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(group_log_z(*inputs, beta=BETA, length_normalization=mean), log_z)


@means_and_sums
def test_group_log_z_is_vargrads(batch, mean):
    """δ has mean 0 in each group, and the gradient is that of the variance of ``log π/πref − β·r`` within groups."""
    group, settings = torch.tensor([2, 0, 2, 0, 2, 0]), {"beta": BETA, "length_normalization": mean}
    batch["old_log_prob"] = batch["log_prob"]
    batch["mask"][4] = False  # a row without tokens belongs to no group
    inputs = batch["log_prob"], batch["anchor_log_prob"], batch["reward"], batch["mask"]
    batch["log_z"] = group_log_z(*inputs, group, **settings)
    _, metrics = trajectory_balance(**batch, **settings)
    log_prob = batch["log_prob"].double().requires_grad_()
    length = batch["mask"].sum(-1).clamp(min=1) if mean else 1
    residual = ((log_prob - batch["anchor_log_prob"]) * batch["mask"]).sum(-1) / length - BETA * batch["reward"]
    variances = []
    for rows in ([1, 3, 5], [0, 2]):
        assert metrics["delta"][rows].mean().abs() < 1e-6
        assert batch["log_z"][rows].unique().numel() == 1
        variances.append(len(rows) * residual[rows].var(correction=0))
    losses, slope, _ = gradients(batch, length_normalization=mean)
    (wanted,) = torch.autograd.grad(sum(variances), log_prob)
    assert_equal((losses.sum(), slope), (sum(variances).detach(), wanted))


@pytest.mark.parametrize(("drop_last", "means"), [(False, [1.5, 4.0]), (True, [1.0, 4.0])])
def test_last_token_of_a_prompt_is_excluded_unless_it_is_the_only_one(drop_last, means):
    rows = [torch.tensor([[1.0], [2.0], [9.0]]), torch.tensor([[4.0], [9.0], [9.0]])]  # 9 is in the answers
    assert mean_over_prompts(rows, [2, 1], drop_last).flatten().tolist() == means
