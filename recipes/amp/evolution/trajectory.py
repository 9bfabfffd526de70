"""Play the trajectories of a policy, replay them up to a step, and select them by their return."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from gymnasium.spaces.utils import flatdim
from torch import nn

from recipes.amp.environment import flat_observation, make_env

ORIGINS = ("collected", "revised", "recombined")


@dataclass(frozen=True)
class Trajectory:
    """An episode that ``env.reset(seed=seed)`` and the actions replay.

    Args:
        observations: (T, O), each before the action of its step.
        actions: (T,).
        rewards: (T,).
        origin: one of ``ORIGINS``.
    """

    seed: int
    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    origin: str = "collected"

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
        """Sample an action; a step of the environment, not of the trainer: in fp32."""
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
    """Play an episode from ``seed``: first the actions of ``prefix``, then the policy's.

    Raises:
        ValueError: an observation or a reward that is inf or NaN, by its step.
    """
    observations, actions, rewards = [], [], []
    observation, _ = env.reset(seed=seed)
    done = False
    while not done:
        step = len(actions)
        where = f"env={env.spec.id}, seed {seed}, step {step}"
        observations.append(flat_observation(env.observation_space, observation, where))
        actions.append(int(prefix[step]) if step < len(prefix) else policy.act(observations[-1], rng))
        observation, reward, terminated, truncated, _ = env.step(env.action_space.start + actions[-1])
        if not math.isfinite(reward):
            raise ValueError(f"env={env.spec.id}, seed {seed}, step {step + 1}: the reward is {reward}")
        rewards.append(float(reward))
        done = terminated or truncated
    return Trajectory(seed, np.stack(observations), np.array(actions), np.array(rewards), origin)


def branch(env: gymnasium.Env, policy: Policy, parent: Trajectory, rng: np.random.Generator, origin: str) -> Trajectory:
    """Replay a trajectory up to a step that ``rng`` chooses, and continue with ``policy``.

    Raises:
        ValueError: the replay led to other observations or rewards.
    """
    step = int(rng.integers(len(parent.actions)))
    child = play(env, policy, parent.seed, rng, parent.actions[:step], origin)
    same_observations = np.array_equal(child.observations[: step + 1], parent.observations[: step + 1])
    if not (same_observations and np.array_equal(child.rewards[:step], parent.rewards[:step])):
        raise ValueError(f"env={env.spec.id} is not deterministic: replaying seed {parent.seed} gave other steps")
    return child


def replayable_env(name: str, seed: int) -> gymnasium.Env:
    """Make an environment of discrete actions, and check that seeds and actions replay its trajectories.

    Args:
        seed: of the first of the two trajectories that are replayed.

    Raises:
        ValueError: it is unknown, its actions are not discrete, or the same seed and actions lead elsewhere.
    """
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


def select(trajectories: Sequence[Trajectory], number: int) -> list[Trajectory]:
    """Return the best by return; of equals those that come first."""
    return sorted(trajectories, key=lambda each: -each.total)[:number]
