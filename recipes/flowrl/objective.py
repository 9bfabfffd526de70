"""FlowRL's objective in fp32, by torch alone: ``w·δ²``, ``δ = log Z(x) + mean log π(y|x) − β·r − mean log πref(y|x)``.

Source: Zhu et al. 2025, "FlowRL: Matching Reward Distributions for LLM Reasoning", arXiv 2509.15207; log Z as a group's
mean: Richter et al. 2020, "VarGrad", arXiv 2010.10436; weights per token: CISPO, arXiv 2506.13585.

Its gradient is that of ``−2β·w·A·mean log π`` with ``A = r − (log Z + mean log π/πref)/β`` held fixed: GRPO by
sequences, a k2 penalty of weight 1/β for leaving πref, and a learned baseline. Its fixed point is
``π ∝ πref·exp(|y|·(β·r − log Z))``, and with sums over tokens in the place of means ``π ∝ πref·exp(β·r)``.
"""

import math

import torch

# Whatever the clip, a weight lies in [exp(-20), exp(20)], as those of verl's rollout correction do.
LARGEST_WEIGHT = math.exp(20.0)


def mean_of_tokens(values: torch.Tensor, mask: torch.Tensor, length_normalization: bool = True) -> torch.Tensor:
    """Mean, or sum, over each row's tokens in the ``mask``, ``(rows,)`` in fp32; 0 where there is none.

    Args:
        values, mask: ``(rows, tokens)``; what is outside of the mask may be anything, NaN too.
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
    """Weights of what an older policy sampled, clipped in log space, without gradient.

    Args:
        log_prob, old_log_prob, mask: ``(rows, tokens)``.
        level: "sequence": one weight a row, of the product over its tokens; "token": CISPO; "none": all weights are 1.
        clip: ``(least, largest)`` weight.

    Returns:
        weights, ``(rows, tokens)`` or where a row has but one ``(rows, 1)``, and whether each was clipped, as 0 and 1.
    """
    if level == "none":
        return mask.new_ones(len(mask), 1).float(), mask.new_zeros(len(mask), 1).float()
    log_ratio = torch.where(mask, log_prob.detach().float() - old_log_prob.float(), 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)
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
    """The loss of each answer, and what to report of it. A row without tokens has neither loss nor gradient.

    Args:
        log_prob: ``(rows, tokens)``, of the policy, with gradient.
        old_log_prob, anchor_log_prob: the same of the policy that sampled, and of πref.
        reward, log_z: ``(rows,)``; gradient flows into ``log_z``.
        mask: ``(rows, tokens)``, bool: the answer's tokens.
        beta: inverse temperature of the reward.
        level, clip: of :func:`importance_weights`.
        length_normalization: whether log-probabilities are means over tokens or sums.
        rollout_weights: ``(rows, tokens)``, verl's weights of trainer against rollout.

    Returns:
        losses ``(rows,)`` in fp32, and by name ``(rows,)`` without gradient: ``delta``, ``delta_square``, ``log_z``,
        ``weight``, ``weight_square``, ``clipped``.
    """
    weights, clipped = importance_weights(log_prob, old_log_prob, mask, level, clip)
    if rollout_weights is not None:
        weights = torch.where(mask, weights * rollout_weights.float(), 0.0)
    weight = mean_of_tokens(weights, mask)
    present = mask.any(-1)
    log_z = torch.where(present, log_z.float(), 0.0)
    balance = mean_of_tokens(log_prob.detach().float() - anchor_log_prob.float(), mask, length_normalization)
    delta = torch.where(present, log_z.detach() + balance - beta * reward.float(), 0.0)
    # Weights of tokens weigh gradients, so the loss is given by them; its value is w·δ², w the mean of a row's weights.
    slope = 2 * delta * (mean_of_tokens(weights * log_prob.float(), mask, length_normalization) + weight * log_z)
    losses = weight * delta.square() + (slope - slope.detach())
    facts = {
        "delta": delta,
        "delta_square": delta.square(),
        "log_z": log_z.detach(),
        "weight": weight,
        "weight_square": weight.square(),
        "clipped": mean_of_tokens(clipped, mask),
    }
    return losses, facts


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
    """log Z(x) without a head (VarGrad), ``(rows,)`` in fp32: that at which the δ of a group of answers have mean 0.

    Args:
        log_prob: ``(rows, tokens)``, of the policy that sampled: the value is the same for every split of the batch.
        anchor_log_prob, reward, mask: as in :func:`trajectory_balance`.
        group: ``(rows,)``, int64, the number of each row's prompt, from 0.
    """
    present = mask.any(-1)
    balance = mean_of_tokens(log_prob.float() - anchor_log_prob.float(), mask, length_normalization)
    value = torch.where(present, beta * reward.float() - balance, 0.0)
    sums = value.new_zeros(2, int(group.max()) + 1).index_add(1, group, torch.stack([value, present.float()]))
    return (sums[0] / sums[1].clamp(min=1))[group]
