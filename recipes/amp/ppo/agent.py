"""The policy and value networks, and the log-probabilities of factored, masked actions."""

from collections.abc import Sequence
from itertools import pairwise

import torch


class Agent(torch.nn.Module):
    """A policy with a head for each factor of the action, and a value; nothing is shared. Orthogonal first weights.

    Args:
        inputs: size of a flat observation.
        factors: number of choices of each factor of an action; a Discrete action is one factor.
        hidden: width of the hidden layers.
        layers: hidden layers, of policy and value each.
        generator: of the first weights.
    """

    def __init__(self, inputs: int, factors: Sequence[int], hidden: int, layers: int, generator: torch.Generator):
        super().__init__()

        def linear(inputs: int, outputs: int, gain: float) -> torch.nn.Linear:
            layer = torch.nn.Linear(inputs, outputs)
            torch.nn.init.orthogonal_(layer.weight, gain, generator)
            torch.nn.init.zeros_(layer.bias)
            return layer

        def body() -> torch.nn.Sequential:
            sizes = pairwise([inputs] + [hidden] * layers)
            return torch.nn.Sequential(*(m for a, b in sizes for m in (linear(a, b, 2**0.5), torch.nn.Tanh())))

        self.policy, self.value = body(), body()
        self.policy_heads = torch.nn.ModuleList(linear(hidden, choices, 0.01) for choices in factors)
        self.value_head = linear(hidden, 1, 1.0)

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """observations (N, inputs) -> logits (N, sum of factors) and values (N,), both fp32."""
        features = self.policy(observations)
        logits = torch.cat([head(features) for head in self.policy_heads], -1)
        return logits.float(), self.value_head(self.value(observations)).squeeze(-1).float()


def masked_log_softmax(logits: torch.Tensor, allowed: torch.Tensor, factors: Sequence[int]) -> list[torch.Tensor]:
    """Return the log-probabilities (N, choices), fp32, of each factor's choices; masked choices have probability 0.

    Their logits become fp32's least: a finite number, so that entropy and gradients stay finite.

    Args:
        logits: (N, sum of factors), fp32.
        allowed: the same shape, bool; at least one choice of each factor.
    """
    assert logits.dtype == torch.float32, logits.dtype
    masked = logits.masked_fill(~allowed, torch.finfo(torch.float32).min)
    return [part.log_softmax(-1) for part in masked.split(list(factors), -1)]


def joint_log_prob(log_probs: Sequence[torch.Tensor], actions: torch.Tensor) -> torch.Tensor:
    """Return the log-probability (N,) of whole actions (N, factors): the sum over factors."""
    chosen = (each.gather(-1, action) for each, action in zip(log_probs, actions.split(1, -1), strict=True))
    return sum(chosen).squeeze(-1)
