"""Trees and projects of the patch tool's tests: the wheel of verl 0.9.1 and the tiny stack for it."""

import shutil
from pathlib import Path

import pytest
from support.tiny_stack import RELEASE, make_project

from lib.patches.apply import apply
from lib.patches.wheels import unpacked_wheel


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the wheel of 0.9.1, unpacked; read it, do not change it."""
    root = unpacked_wheel(RELEASE, tmp_path_factory.mktemp("wheel"))
    for beside in ("scripts", "tests"):  # irrelevant here, and every copy is faster without
        shutil.rmtree(root / beside)
    return root


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with the tiny stack; read it, do not change it."""
    return make_project(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def project(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny project to change."""
    return shutil.copytree(tiny, tmp_path / "project", symlinks=True)


@pytest.fixture
def target(pristine: Path, tmp_path: Path) -> Path:
    """An unpacked release to change."""
    return shutil.copytree(pristine, tmp_path / "target")


@pytest.fixture
def patched(tiny: Path, target: Path) -> Path:
    """The target with the tiny stack applied."""
    apply(target, tiny)
    return target
