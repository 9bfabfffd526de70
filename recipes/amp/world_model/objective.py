"""The world model's loss, and its open-loop errors on held-out trajectories."""

import torch
from torch import nn
from torch.nn import functional as F

from recipes.amp.world_model.config import CONTEXT
from recipes.amp.world_model.model import WorldModel
from recipes.amp.world_model.trajectories import Trajectories


def mean_over(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the mean of values (N, T) by weights (N, T); 0 where all weights are 0."""
    return (values * weights).sum() / weights.sum().clamp(min=1.0)


def world_model_loss(model: nn.Module, batch: Trajectories, context: int = CONTEXT) -> torch.Tensor:
    """Return the one-step error of the steps in the context, plus the open-loop error of those after it; 0-d, in fp32.

    An error is squared, in standard deviations, of observation (mean of its components) and reward, plus the cross
    entropy of the end.
    """
    predicted = model(batch.observations, batch.actions, context)
    owner = model.module if hasattr(model, "module") else model
    with torch.autocast(batch.rewards.device.type, enabled=False):
        observations = (batch.observations[:, 1:] - owner.observation_mean) / owner.observation_std
        rewards = (batch.rewards - owner.reward_mean) / owner.reward_std
        error = (predicted.observations - observations).square().mean(-1) + (predicted.rewards - rewards).square()
        error = error + F.binary_cross_entropy_with_logits(predicted.ends, batch.ends, reduction="none")
        parts = slice(None, context), slice(context, None)
        return sum(mean_over(error[:, part], batch.valid[:, part]) for part in parts)


def open_loop_errors(model: WorldModel, data: Trajectories, context: int) -> dict[str, float]:
    """Return root mean square errors after the context, in standard deviations of the training data.

    ``model`` is the observation's and ``reward`` the reward's; ``mean`` is the observation's where its mean is
    predicted, ``last_value`` where the last one of the context is.
    """
    predicted = model.predict(data.observations, data.actions, context)
    true, last = data.observations[:, 1:], data.observations[:, context - 1 : context].expand_as(predicted.observations)
    valid = data.valid[:, context:]

    def error(guess: torch.Tensor) -> float:
        squared = ((guess - true) / model.observation_std).square().mean(-1)
        return mean_over(squared[:, context:], valid).sqrt().item()

    rewards = ((predicted.rewards - data.rewards) / model.reward_std).square()[:, context:]
    return {
        "model": error(predicted.observations),
        "mean": error(model.observation_mean.expand_as(true)),
        "last_value": error(last),
        "reward": mean_over(rewards, valid).sqrt().item(),
    }
