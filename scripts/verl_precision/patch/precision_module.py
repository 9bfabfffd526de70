"""Load the package ``verl/utils/precision`` of a patched tree, without importing the rest of that verl."""

from __future__ import annotations  # the doctor's check of an older Python imports this

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = "verl/utils/precision/__init__.py"


def precision_file(root: Path) -> Path | None:
    """Return the file of ``verl.utils.precision`` in the folder ``root`` that contains ``verl/``; None without one."""
    return root / PACKAGE if (root / PACKAGE).is_file() else None


def load_precision(root: Path, name: str) -> ModuleType:
    """Import the tree's ``verl.utils.precision`` as ``name``; imports torch and writes no bytecode into the tree.

    An earlier import as ``name``, of another tree or of this one, is dropped from ``sys.modules``.

    Raises:
        FileNotFoundError: the tree has none.
    """
    if precision_file(root) is None:
        raise FileNotFoundError(f"{root} has no {PACKAGE}")
    for loaded in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
        del sys.modules[loaded]
    importlib.invalidate_caches()  # the tree may be younger than this process
    spec = importlib.util.spec_from_file_location(name, root / PACKAGE)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # its modules and dataclasses look it up there
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    return module
