"""Find installed packages of other projects without importing them."""

import importlib.util
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from verl_precision.errors import Refused

PROJECTS = {"hydra": "hydra-core", "yaml": "pyyaml"}  # on PyPI, where another name is imported


def package_folder(name: str, site: Path | None = None) -> Path | None:
    """Return the folder of the package ``name`` in ``site``, else of the one that this Python would import."""
    if site is not None and (site / name / "__init__.py").exists():
        return site / name
    spec = importlib.util.find_spec(name)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def installed_verl() -> Path:
    (verl,) = importlib.util.find_spec("verl").submodule_search_locations
    return Path(verl)


def verl_version(package: Path) -> str:
    """Return the version of the verl in a package folder; another tree may precede the installed distribution."""
    return (package / "version" / "version").read_text().strip()


def version(name: str) -> str | None:
    """Return the version of the first distribution of this name on the path; None if there is none."""
    return next((each.version for each in metadata.distributions(name=name)), None)


def missing_packages(names: Iterable[str]) -> list[str]:
    """Return those of the packages that this Python lacks; they are named as they are imported."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def check_packages(names: Iterable[str]) -> None:
    """Refuse a Python that lacks some of the packages, which are named as they are imported."""
    if lacking := [PROJECTS.get(name, name) for name in missing_packages(names)]:
        ways = f"use the Python of a verl that trains, or {sys.executable} -m pip install {' '.join(lacking)}"
        raise Refused(f"{sys.executable} lacks {', '.join(lacking)}; {ways}")
