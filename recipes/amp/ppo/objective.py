"""PPO's arithmetic, in fp32: generalised advantages and the clipped loss."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from recipes.amp.ppo.agent import joint_log_prob, masked_log_softmax
from recipes.amp.ppo.config import PPOConfig


class RolloutBatch(NamedTuple):
    """Steps of a rollout without those that reset, of B rows; floats are fp32."""

    observations: torch.Tensor  # (B, inputs)
    allowed: torch.Tensor  # (B, sum of factors), bool
    actions: torch.Tensor  # (B, factors), int64
    log_probs: torch.Tensor  # (B,), of the policy that acted
    advantages: torch.Tensor  # (B,), of mean 0 and variance 1
    returns: torch.Tensor  # (B,)


def generalised_advantages(
    rewards: torch.Tensor, values: torch.Tensor, terminated: torch.Tensor, ended: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Return advantages (T, N), fp32; those of steps that reset are undefined.

    An episode that terminated is worth 0 from there on; one that was cut off, or that the rollout ends in, the value
    of the observation it came to.

    Args:
        rewards: (T, N).
        values: (T + 1, N), of each step's observation and of the one after the last step.
        terminated: (T, N), bool.
        ended: (T, N), bool: terminated or truncated.
    """
    deltas = rewards + gamma * values[1:] * ~terminated - values[:-1]
    advantages = torch.empty_like(deltas)
    following = torch.zeros_like(deltas[0])
    for step in reversed(range(len(deltas))):
        following = deltas[step] + gamma * lam * ~ended[step] * following
        advantages[step] = following
    return advantages


def ppo_loss(
    logits: torch.Tensor, values: torch.Tensor, batch: RolloutBatch, factors: Sequence[int], config: PPOConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return PPO's clipped loss, 0-d, fp32, and its terms for a logger, 0-d each."""
    log_probs = masked_log_softmax(logits, batch.allowed, factors)
    difference = joint_log_prob(log_probs, batch.actions) - batch.log_probs
    ratio = difference.exp()
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    policy_loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()
    value_loss = (values - batch.returns).square().mean()
    entropy = -sum((each.exp() * each).sum(-1) for each in log_probs).mean()
    loss = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
    with torch.no_grad():
        terms = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": (ratio - 1 - difference).mean(),
            "clip_fraction": (ratio != clipped).float().mean(),
            "ratio_deviation": (ratio - 1).abs().mean(),
        }
    return loss, terms
