"""Collect trajectories of an environment for the training of the world model."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import gymnasium
import numpy as np
import torch
from gymnasium.spaces.utils import flatdim, flatten

from recipes.amp.environment import flat_observation, make_env


class Trajectories(NamedTuple):
    """N stretches of episodes, T steps each at most; after its end a stretch is zero and not ``valid``."""

    observations: torch.Tensor  # (N, T + 1, O), the last is where the last action led
    actions: torch.Tensor  # (N, T, A), a discrete one as one-hot
    rewards: torch.Tensor  # (N, T)
    ends: torch.Tensor  # (N, T), 1 where the environment terminated; a time limit does not
    valid: torch.Tensor  # (N, T), 1 where there is a step

    def at(self, rows: torch.Tensor) -> "Trajectories":
        """Return the stretches at these indices."""
        return Trajectories(*(each[rows] for each in self))

    def to(self, device: torch.device) -> "Trajectories":
        """Return the stretches on ``device``."""
        return Trajectories(*(each.to(device) for each in self))


def collect(
    env: str | gymnasium.Env,
    steps: int,
    seed: int,
    length: int = 50,
    policy: Optional[Callable[[Any], Any]] = None,
) -> Trajectories:
    """Act in an environment for ``steps`` steps, in episodes from the resets of ``seed``.

    Args:
        env: a Gymnasium environment, or its name; spaces other than boxes are flattened as Gymnasium does.
        length: T; a longer episode continues in the next trajectory.
        policy: observation -> action; ``None`` samples the action space.

    Raises:
        ValueError: an unknown environment; an observation or a reward that is inf or NaN, by its step and component.
    """
    env = make_env(env) if isinstance(env, str) else env
    name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    env.action_space.seed(seed)
    space, actions = env.observation_space, env.action_space
    policy = policy or (lambda observation: actions.sample())
    stretches: list[list[tuple]] = []
    observation, ended = None, True
    for step in range(steps):
        if ended:
            observation, _ = env.reset(seed=seed if step == 0 else None)
        before = flat_observation(space, observation, f"env={name}, step {step}")
        if ended or len(stretches[-1]) == length:
            stretches.append([])
        action = policy(observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        after = flat_observation(space, observation, f"env={name}, step {step + 1}")
        if not math.isfinite(reward):
            raise ValueError(f"env={name}, step {step + 1}: the reward is {reward}")
        stretches[-1].append((before, flatten(actions, action), reward, terminated, after))
        ended = terminated or truncated
    env.close()
    shape = len(stretches), length
    data = Trajectories(
        torch.zeros(len(stretches), length + 1, flatdim(space)),
        torch.zeros(*shape, flatdim(actions)),
        *(torch.zeros(shape) for _ in range(3)),
    )
    for row, taken in enumerate(stretches):
        before, action, reward, terminated, after = map(np.stack, zip(*taken, strict=True))
        data.observations[row, : len(taken)] = torch.from_numpy(before)
        data.observations[row, len(taken)] = torch.from_numpy(after[-1])
        for tensor, values in zip(data[1:4], (action, reward, terminated), strict=True):
            tensor[row, : len(taken)] = torch.from_numpy(values.astype(np.float32))
        data.valid[row, : len(taken)] = 1.0
    return data
