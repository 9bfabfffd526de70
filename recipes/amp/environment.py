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
    try:
        return make(name, **settings)
    except (gymnasium.error.Error, ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"env={name} must be an environment's NAME or MODULE:NAME: {reason}") from None


def play_episode(env: gymnasium.Env, choose: Callable, seed: Optional[int]) -> Iterator[tuple]:
    """Yield each step of an episode: flat observation, action, reward, whether it terminated, next flat observation.

    Observations are (O,), fp32. One that is inf or NaN, or such a reward, raises ``InvalidEnvironmentError``.
    """

    def flat(observation: Any, reward: float, step: int) -> np.ndarray:
        vector = np.asarray(flatten(env.observation_space, observation), dtype=np.float32).reshape(-1)
        if not (np.isfinite(vector).all() and math.isfinite(reward)):
            where = f"env={env.spec.id}, seed {seed}, step {step}"
            raise InvalidEnvironmentError(f"{where}: the observation or the reward, {reward}, is not finite")
        return vector

    observation, _ = env.reset(seed=seed)
    before, step, ended = flat(observation, 0.0, 0), 0, False
    while not ended:
        action = choose(before)
        observation, reward, terminated, truncated, _ = env.step(action)
        step += 1
        after = flat(observation, reward, step)
        yield before, action, float(reward), terminated, after
        before, ended = after, terminated or truncated
