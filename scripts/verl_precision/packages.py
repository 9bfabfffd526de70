"""Check, before anything long starts, that this Python has the packages of other projects that a command needs."""

import importlib.util
import sys
from collections.abc import Iterable

from verl_precision.errors import Refused

PROJECTS = {"hydra": "hydra-core", "yaml": "pyyaml"}  # on PyPI, where another name is imported


def check_packages(names: Iterable[str]) -> None:
    """Check that this Python has the packages, which are named as they are imported.

    Raises:
        Refused: it lacks some.
    """
    if lacking := [PROJECTS.get(name, name) for name in names if importlib.util.find_spec(name) is None]:
        install = f"install them: {sys.executable} -m pip install {' '.join(lacking)}"
        raise Refused(
            f"{sys.executable} lacks {', '.join(lacking)}; use the Python of a verl that trains, or {install}"
        )
