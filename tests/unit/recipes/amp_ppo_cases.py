"""Small PPO runs: shared by the tests of recipes/amp/ppo."""

from typing import Any

import amp_environments  # noqa: F401  registers them
import torch

from recipes.amp.ppo.algorithm import PPO
from recipes.amp.ppo.config import PPOConfig

DTYPES = ("float32", "float16", "bfloat16")
SMALL = {"num_envs": 4, "num_steps": 8, "total_steps": 96, "hidden": 16, "epochs": 2, "minibatches": 2, "device": "cpu"}


def amp_settings(dtype: str) -> dict[str, str | bool]:
    """Return the fields of PPOConfig that train in ``dtype``."""
    return {} if dtype == "float32" else {"use_amp": True, "dtype": dtype}


def small_ppo(dtype: str = "float32", sources: dict[str, str] | None = None, **settings: Any) -> PPO:
    """Return a small run in ``dtype``, on the CPU."""
    return PPO(PPOConfig(**{**SMALL, **amp_settings(dtype), **settings}), sources)


def weights(ppo: PPO) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in ppo.agent.state_dict().items()}
