"""Trees and projects of the patch tool's tests: releases of a few files, and the tiny stacks for them."""

import shutil
from pathlib import Path

import pytest
from support.small_projects import OAT_RELEASE, RELEASE, make_tiny_project, wheel_of

from verl_precision.patch.apply import apply
from verl_precision.patch.releases import OAT
from verl_precision.patch.wheels import unpack


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with the tiny stacks; read it, do not change it."""
    return make_tiny_project(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def project(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny project to change."""
    return shutil.copytree(tiny, tmp_path / "project")


@pytest.fixture(scope="session")
def pristine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny project's release of verl, unpacked; read it, do not change it."""
    return unpack(wheel_of(tiny, RELEASE), tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def target(pristine: Path, tmp_path: Path) -> Path:
    """An unpacked release of verl to change."""
    return shutil.copytree(pristine, tmp_path / "target")


@pytest.fixture
def patched(tiny: Path, target: Path) -> Path:
    """The target with the tiny stack applied."""
    apply(target, tiny)
    return target


@pytest.fixture(scope="session")
def pristine_oat(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny project's older release of OAT, unpacked; read it, do not change it."""
    return unpack(wheel_of(tiny, OAT_RELEASE, OAT), tmp_path_factory.mktemp("oat"))
