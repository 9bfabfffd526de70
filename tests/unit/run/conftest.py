"""Fixtures of the tests of runs: verl's own checks in this process, and a process that imports another verl."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_precision.run import validation


@pytest.fixture
def imported(monkeypatch) -> Callable[..., None]:
    """``imported(root)``: make this process import the verl of a folder, or without one nothing."""
    path = [*sys.path]

    def imported(root: Path | None) -> None:
        monkeypatch.delitem(sys.modules, "verl", raising=False)
        monkeypatch.setattr(sys, "path", [str(root), *path] if root else [])

    return imported


@pytest.fixture
def validated_here(monkeypatch) -> None:
    """Let verl check each job in this process, which takes seconds less than one with the job's platform."""
    monkeypatch.setattr(validation, "platform_variables", lambda job: {})
