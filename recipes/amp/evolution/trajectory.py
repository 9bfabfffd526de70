"""Play the trajectories of a policy, and replay them up to a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from gymnasium.spaces.utils import flatdim
from torch import nn

from recipes.amp.environment import make_env, play_episode

ORIGINS = ("collected", "revised", "recombined")


@dataclass(frozen=True)
class Trajectory:
    """An episode that ``env.reset(seed=seed)`` and the actions replay."""

    seed: int
    observations: np.ndarray  # (T, O), each before the action of its step
    actions: np.ndarray  # (T,)
    rewards: np.ndarray  # (T,)
    origin: str = "collected"  # one of ORIGINS

    @property
    def total(self) -> float:
        """Return the sum of the rewards."""
        return float(self.rewards.sum())


class Policy(nn.Sequential):
    """Observation (…, O) -> logits of the actions (…, A)."""

    def __init__(self, env: gymnasium.Env, hidden: int):
        inputs, outputs = flatdim(env.observation_space), int(env.action_space.n)
        super().__init__(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))

    @torch.no_grad()
    def act(self, observation: np.ndarray, rng: np.random.Generator) -> int:
        """Sample an action, in fp32."""
        probabilities = self(torch.from_numpy(observation)).softmax(-1).double().cumsum(-1)
        return min(int((probabilities < rng.random()).sum()), len(probabilities) - 1)


def play(
    env: gymnasium.Env,
    policy: Policy,
    seed: int,
    rng: np.random.Generator,
    prefix: Sequence[int] = (),
    origin: str = "collected",
) -> Trajectory:
    """Play an episode from ``seed``: first the actions of ``prefix``, then the policy's."""
    replayed, start = iter(prefix), env.action_space.start

    def choose(observation: np.ndarray) -> int:
        action = next(replayed, None)
        return int(start + (policy.act(observation, rng) if action is None else action))

    steps = play_episode(env, choose, seed, f"env={env.spec.id}, seed {seed}")
    observations, actions, rewards, *_ = zip(*steps, strict=True)
    return Trajectory(seed, np.stack(observations), np.array(actions) - start, np.array(rewards), origin)


def branch(env: gymnasium.Env, policy: Policy, parent: Trajectory, rng: np.random.Generator, origin: str) -> Trajectory:
    """Replay a trajectory up to a step that ``rng`` chooses, check the replay, and continue with ``policy``."""
    step = int(rng.integers(len(parent.actions)))
    child = play(env, policy, parent.seed, rng, parent.actions[:step], origin)
    same_observations = np.array_equal(child.observations[: step + 1], parent.observations[: step + 1])
    if not (same_observations and np.array_equal(child.rewards[:step], parent.rewards[:step])):
        raise ValueError(f"env={env.spec.id} is not deterministic: replaying seed {parent.seed} gave other steps")
    return child


def replayable_env(name: str, seed: int) -> gymnasium.Env:
    """Make an environment of discrete actions, and check that another instance replays two of its trajectories."""
    first, second = make_env(name), make_env(name)
    if not isinstance(first.action_space, gymnasium.spaces.Discrete):
        raise ValueError(f"env={name} has actions {first.action_space}: choose an environment with discrete actions")
    policy, rng = Policy(first, 1), np.random.default_rng(seed)
    for each in (seed, seed + 1):
        one = play(first, policy, each, rng)
        two = play(second, policy, each, rng, one.actions)
        if not all(np.array_equal(getattr(one, of), getattr(two, of)) for of in ("observations", "actions", "rewards")):
            raise ValueError(
                f"env={name} is not deterministic: replaying seed {each} with the same actions gave another "
                "trajectory; choose a deterministic environment"
            )
    return first
