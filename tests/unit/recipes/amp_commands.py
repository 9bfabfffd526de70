"""The commands of recipes/amp, run in this process: shared by their tests."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import amp_environments  # noqa: F401  registers them
import pytest


def words(**settings: Any) -> list[str]:
    """Return a command's words: ``--num-envs=4`` of ``num_envs=4``, ``--use-amp`` of ``use_amp=True``."""
    options = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    return [option if value is True else f"{option}={value}" for option, value in options.items()]


def run(command: ModuleType, *given: object) -> None:
    """Run a command's ``main`` on its words."""
    with patch.object(sys, "argv", [command.PROGRAM, *map(str, given)]):
        command.main()


def refusal(command: ModuleType, *given: object) -> str:
    """Return the line that ends a command, without the name that it begins with."""
    with pytest.raises(SystemExit) as ended:
        run(command, *given)
    line = ended.value.code
    assert isinstance(line, str), "Python prints it to stderr and ends with exit code 1"
    assert line.startswith(f"{command.PROGRAM}: ") and "\n" not in line
    return line.removeprefix(f"{command.PROGRAM}: ")


def records(out: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, which has no NaN or infinity."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]
