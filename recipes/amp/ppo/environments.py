"""Vector environments with checked spaces, observations, rewards and action masks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.spaces.utils import flatdim

from recipes.amp.environment import InvalidEnvironmentError, make_env

NATIVE = ("CartPole-v0", "CartPole-v1")  # have vector environments, which are tested to equal single ones


class EnvironmentState(NamedTuple):
    """State of N environments before the policy acts."""

    observations: torch.Tensor  # (N, inputs), fp32, flat; of a Discrete space one-hot
    allowed: torch.Tensor  # (N, sum of factors), bool: info's action_mask, all True where there is none


class Environments:
    """A vector environment of tensors; the step after an episode's last is a reset (Gymnasium's NEXT_STEP).

    So an episode's last observation is part of the rollout, and bootstrapping from it needs no extra forward.
    ``largest`` is the absolute value of an observation that the networks can represent.
    """

    def __init__(self, env: str, number: int, device: torch.device, largest: float):
        self.env, self.number, self.device, self.largest, self.step_number = env, number, device, largest, 0
        mode = "vector_entry_point" if env in NATIVE else "sync"
        settings = {} if env in NATIVE else {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        self.vector = make_env(
            env, gymnasium.make_vec, num_envs=number, vectorization_mode=mode, vector_kwargs=settings
        )
        self.observation_space = observed = self.vector.single_observation_space
        self.action_space = acted = self.vector.single_action_space
        if not isinstance(observed, Box | Discrete):
            raise InvalidEnvironmentError(f"env={env}: observations are {observed}, but must be Box or Discrete")
        if not isinstance(acted, Discrete | MultiDiscrete):
            raise InvalidEnvironmentError(f"env={env}: actions are {acted}, but must be Discrete or MultiDiscrete")
        self.inputs = flatdim(observed)
        choices = acted.n if isinstance(acted, Discrete) else acted.nvec.ravel()
        self.factors = [int(n) for n in np.atleast_1d(choices)]

    def reset(self, seed: int) -> EnvironmentState:
        """Reset all environments."""
        return self._state(*self.vector.reset(seed=seed))

    def step(self, actions: torch.Tensor) -> tuple[EnvironmentState, np.ndarray, np.ndarray, np.ndarray]:
        """Take actions (N, factors), and return the next state; rewards, terminated and truncated, (N,) each."""
        taken = actions.cpu().numpy().reshape(self.number, *self.action_space.shape) + self.action_space.start
        observations, rewards, terminated, truncated, infos = self.vector.step(taken)
        self.step_number += 1
        self._check("reward", rewards, np.isfinite(rewards), "finite")
        return self._state(observations, infos), rewards, terminated, truncated

    def _state(self, observations: np.ndarray, infos: Mapping[str, Any]) -> EnvironmentState:
        if isinstance(self.observation_space, Discrete):
            flat = np.eye(self.inputs, dtype=np.float32)[observations - self.observation_space.start]
        else:
            flat = np.asarray(observations, dtype=np.float32).reshape(self.number, self.inputs)
        representable = np.abs(flat) <= self.largest  # false of NaN
        self._check("observation", flat, representable, f"finite and at most {self.largest:.5g}")
        allowed = np.ones((self.number, sum(self.factors)), dtype=bool)
        if "action_mask" in infos:
            if not isinstance(self.action_space, Discrete):
                raise InvalidEnvironmentError(
                    f"env={self.env}: an action_mask requires Discrete actions, but these are {self.action_space}"
                )
            allowed = np.asarray(infos["action_mask"]).astype(bool) | ~infos["_action_mask"][:, None]
            self._check("number of actions that action_mask allows", allowed.sum(-1), allowed.any(-1), "at least 1")
        return EnvironmentState(torch.from_numpy(flat).to(self.device), torch.from_numpy(allowed).to(self.device))

    def _check(self, name: str, values: np.ndarray, good: np.ndarray, allowed: str) -> None:
        if not good.all():
            index, *place = np.argwhere(~good)[0].tolist()
            raise InvalidEnvironmentError(
                f"env={self.env}: {name}{place or ''} of environment {index} (of {self.number}) at step "
                f"{self.step_number} is {values[(index, *place)]}: must be {allowed}"
            )
