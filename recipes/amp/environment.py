"""Create Gymnasium environments by name, and play episodes in them."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Optional

import gymnasium
import numpy as np
from gymnasium.spaces.utils import flatten


class InvalidEnvironmentError(ValueError):
    """An environment that no policy can be trained in: its spaces, or what a step returned; the message is one line."""


def make_env(name: str, make: Callable[..., Any] = gymnasium.make, **settings: Any) -> Any:
    """Return ``make(name, **settings)``; raise ``ValueError`` if it is unknown or needs a package that is missing."""
    if name.count(":") > 1:
        raise ValueError(f"env={name} must be NAME or MODULE:NAME")
    try:
        return make(name, **settings)
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"env={name} cannot be created: {' '.join(str(error).split())}") from None


def flat_observation(space: gymnasium.Space, value: Any, where: str) -> np.ndarray:
    """Return an element of a space as a float32 vector; raise ``InvalidEnvironmentError`` if it has an inf or NaN."""
    vector = np.asarray(flatten(space, value), dtype=np.float32).reshape(-1)
    nonfinite = np.flatnonzero(~np.isfinite(vector))
    if len(nonfinite):
        component = nonfinite[0]
        raise InvalidEnvironmentError(f"{where}: component {component} of the observation is {vector[component]}")
    return vector


def play_episode(env: gymnasium.Env, choose: Callable, seed: Optional[int], where: str) -> Iterator[tuple]:
    """Yield each step of an episode: flat observation, action, reward, whether it terminated, next flat observation.

    An observation or a reward that is inf or NaN raises ``InvalidEnvironmentError`` with ``where`` and its step.
    """
    observation, _ = env.reset(seed=seed)
    before, step, ended = flat_observation(env.observation_space, observation, f"{where}, step 0"), 0, False
    while not ended:
        action = choose(before)
        observation, reward, terminated, truncated, _ = env.step(action)
        step += 1
        after = flat_observation(env.observation_space, observation, f"{where}, step {step}")
        if not math.isfinite(reward):
            raise InvalidEnvironmentError(f"{where}, step {step}: the reward is {reward}")
        yield before, action, float(reward), terminated, after
        before, ended = after, terminated or truncated
