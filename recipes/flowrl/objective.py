"""FlowRL's objective in fp32, with only torch: ``w·δ²``, ``δ = log Z(x) + mean log π(y|x) − β·r − mean log πref(y|x)``.

Source: Zhu et al. 2025, "FlowRL: Matching Reward Distributions for LLM Reasoning", arXiv 2509.15207; log Z as a group's
mean: Richter et al. 2020, "VarGrad", arXiv 2010.10436; weights per token: CISPO, arXiv 2506.13585.

Its gradient is that of ``−2β·w·A·mean log π`` with a constant ``A = r − (log Z + mean log π/πref)/β``: GRPO per
sequence, a k2 penalty of weight 1/β on the distance to πref, and a learned baseline. Its fixed point is
``π ∝ πref·exp(|y|·(β·r − log Z))``, or with sums over tokens instead of means ``π ∝ πref·exp(β·r)``.
"""

import math

import torch

# Weights are always in [exp(-20), exp(20)], as in verl's rollout correction.
LARGEST_WEIGHT = math.exp(20.0)


def mean_of_tokens(values: torch.Tensor, mask: torch.Tensor, length_normalization: bool = True) -> torch.Tensor:
    """Return the mean, or the sum, over the unmasked tokens of each row, ``(rows,)`` in fp32; 0 for an empty row.

    Args:
        values, mask: ``(rows, tokens)``; values outside the mask are ignored, even NaN.
    """
    total = torch.where(mask, values.float(), 0.0).sum(-1)
    return total / mask.sum(-1).clamp(min=1) if length_normalization else total


def importance_weights(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    mask: torch.Tensor,
    level: str,
    clip: tuple[float, float] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return importance weights of the samples of an older policy, clipped in log space, without gradient.

    Args:
        log_prob, old_log_prob, mask: ``(rows, tokens)``.
        level: "sequence": one weight per row, the product over its tokens; "token": CISPO; "none": all weights are 1.
        clip: ``(least, largest)`` weight.

    Returns:
        Weights, ``(rows, tokens)`` or ``(rows, 1)``, and whether each was clipped, as 0 or 1.
    """
    if level == "none":
        return mask.new_ones(len(mask), 1).float(), mask.new_zeros(len(mask), 1).float()
    log_ratio = torch.where(mask, log_prob.detach().float() - old_log_prob.float(), 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)  # (rows, 1), of whole answers
    low, high = (math.log(min(max(bound, 1 / LARGEST_WEIGHT), LARGEST_WEIGHT)) for bound in clip or (0.0, math.inf))
    return log_ratio.clamp(low, high).exp(), ((log_ratio < low) | (log_ratio > high)).float()


def trajectory_balance(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    anchor_log_prob: torch.Tensor,
    reward: torch.Tensor,
    log_z: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float,
    level: str = "sequence",
    clip: tuple[float, float] | None = None,
    length_normalization: bool = True,
    rollout_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of each answer and its metrics. A row without tokens has neither loss nor gradient.

    Args:
        log_prob: ``(rows, tokens)``, of the policy, with gradient.
        old_log_prob, anchor_log_prob: ``(rows, tokens)``, of the policy that sampled, and of πref.
        reward, log_z: ``(rows,)``; gradient flows into ``log_z``.
        mask: ``(rows, tokens)``, bool: the answer's tokens.
        beta: inverse temperature of the reward.
        level, clip: as in :func:`importance_weights`.
        length_normalization: whether log-probabilities are averaged or summed over tokens.
        rollout_weights: ``(rows, tokens)``, verl's importance weights of trainer against rollout.

    Returns:
        Losses ``(rows,)`` in fp32, and metrics ``(rows,)`` without gradient: ``delta``, ``delta_square``, ``log_z``,
        ``weight``, ``weight_square``, ``clipped``.
    """
    weights, clipped = importance_weights(log_prob, old_log_prob, mask, level, clip)
    if rollout_weights is not None:
        weights = torch.where(mask, weights * rollout_weights.float(), 0.0)
    weight = mean_of_tokens(weights, mask)  # (rows,)
    present = mask.any(-1)
    log_z = torch.where(present, log_z.float(), 0.0)
    balance = mean_of_tokens(log_prob.detach().float() - anchor_log_prob.float(), mask, length_normalization)
    delta = torch.where(present, log_z.detach() + balance - beta * reward.float(), 0.0)
    # Token weights scale gradients, which ``slope`` carries; the value is w·δ² with the mean w of a row's weights.
    slope = 2 * delta * (mean_of_tokens(weights * log_prob.float(), mask, length_normalization) + weight * log_z)
    losses = weight * delta.square() + (slope - slope.detach())
    metrics = {
        "delta": delta,
        "delta_square": delta.square(),
        "log_z": log_z.detach(),
        "weight": weight,
        "weight_square": weight.square(),
        "clipped": mean_of_tokens(clipped, mask),
    }
    return losses, metrics


def group_log_z(
    log_prob: torch.Tensor,
    anchor_log_prob: torch.Tensor,
    reward: torch.Tensor,
    mask: torch.Tensor,
    group: torch.Tensor,
    *,
    beta: float,
    length_normalization: bool = True,
) -> torch.Tensor:
    """Return log Z(x) without a head (VarGrad), ``(rows,)`` in fp32, such that δ has mean 0 in each group of answers.

    Args:
        log_prob: ``(rows, tokens)``, of the policy that sampled, so that log Z does not depend on the micro-batch.
        anchor_log_prob, reward, mask: as in :func:`trajectory_balance`.
        group: ``(rows,)``, int64, the index of each row's prompt.
    """
    present = mask.any(-1)
    balance = mean_of_tokens(log_prob.float() - anchor_log_prob.float(), mask, length_normalization)
    value = torch.where(present, beta * reward.float() - balance, 0.0)  # the log Z for which a row's δ is 0
    # (2, groups): the sum of the values of each group, and the number of its rows that have tokens
    sums = value.new_zeros(2, int(group.max()) + 1).index_add(1, group, torch.stack([value, present.float()]))
    return (sums[0] / sums[1].clamp(min=1))[group]
