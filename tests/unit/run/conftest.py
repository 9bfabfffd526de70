"""Fixtures of the tests of a cluster: trees of verl and a process that imports one of them."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.patches.apply import apply
from lib.patches.wheels import unpacked_wheel


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A folder whose verl/ is the release's, unpatched."""
    return unpacked_wheel("0.9.1", tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def patched(pristine, tmp_path) -> Path:
    apply(Path(shutil.copytree(pristine, tmp_path / "patched")))
    return tmp_path / "patched"


@pytest.fixture
def imported(monkeypatch) -> Callable[[Path | None], None]:
    """Make this process import the verl of a folder, or none if no folder is given."""

    def imported(root: Path | None) -> None:
        monkeypatch.delitem(sys.modules, "verl", raising=False)
        monkeypatch.setattr(sys, "path", [str(root)] if root else [])

    return imported
