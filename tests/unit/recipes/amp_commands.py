"""The commands of recipes/amp, run in this process, and small PPO runs: for their tests."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import amp_environments  # noqa: F401  registers them
import pytest

from recipes.amp.ppo.algorithm import PPO, PPOConfig

DTYPES = ("float32", "float16", "bfloat16")
SMALL = {"num_envs": 4, "num_steps": 8, "total_steps": 96, "hidden": 16, "epochs": 2, "minibatches": 2, "device": "cpu"}


def words(**settings: Any) -> list[str]:
    """Return the words of a command: ``--num-envs=4`` for ``num_envs=4``."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def run(command: ModuleType, *given: object) -> None:
    """Run a command's ``main`` with these words."""
    with patch.object(sys, "argv", [command.PROGRAM, *map(str, given)]):
        command.main()


def refusal(command: ModuleType, *given: object) -> str:
    """Return the line that ends a command, without the name that it begins with."""
    with pytest.raises(SystemExit, match=rf"^{command.PROGRAM}: .*\Z") as ended:
        run(command, *given)
    return ended.value.code.removeprefix(f"{command.PROGRAM}: ")  # a text, so that the exit code is 1


def records(out: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, which has no NaN or infinity."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]


def amp_settings(dtype: str) -> dict[str, str | bool]:
    """Return the fields of PPOConfig that train in ``dtype``."""
    return {} if dtype == "float32" else {"use_amp": True, "dtype": dtype}


def small_ppo(dtype: str = "float32", sources: dict[str, str] | None = None, **settings: Any) -> PPO:
    """Return a small run in ``dtype``, on the CPU."""
    return PPO(PPOConfig(**{**SMALL, **amp_settings(dtype), **settings}), sources)
