"""Select the tests of a file by their imports: the test files from which imports lead to it, the nearest first."""

import ast
import re
from collections import deque
from functools import cache
from pathlib import Path

from verl_precision.errors import Refused

ROOTS = ("scripts", "", "tests", "tests/conformance/verl", "tests/conformance/oat")  # of imports, as in pyproject.toml
TIERS = ("tests/unit", "tests/engine")  # whose tests need no other release and no training job
# A script or module that a test starts in a process of its own is named in a string.
NAMED = re.compile(r"(?:scripts/)?(\w+)\.py\b|\b((?:recipes|verl_precision)(?:\.\w+)+)")


@cache
def references(file: Path, root: Path) -> frozenset[Path]:
    """Return the project's files that a Python file imports, at any depth, or names in a string."""
    names, strings = set(), []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node.value)
    files = {found for name in names if (found := module_file(name, root))}
    for script, module in NAMED.findall("\n".join(strings)):
        found = root / "scripts" / f"{script}.py" if script else module_file(module, root)
        if found and found.exists():
            files.add(found)
    return frozenset(files - {file})


@cache
def module_file(name: str, root: Path) -> Path | None:
    """Return the project's file that contains a module; None: it is a name in a module, or another project's."""
    path = name.replace(".", "/")
    for base in ROOTS:
        if (file := root / base / f"{path}.py").exists():
            return file
    return None


def distance(test: Path, file: Path, root: Path) -> int | None:
    """Return the number of imports that lead from ``test`` to ``file``; None: none do."""
    seen, queue = {test: 0}, deque([test])
    while queue:
        here = queue.popleft()
        if here == file:
            return seen[here]
        for target in references(here, root):
            if target not in seen:
                seen[target] = seen[here] + 1
                queue.append(target)
    return None


def select_tests(file: str, root: Path) -> tuple[str, ...]:
    """Return the test files of the quick tiers whose imports lead to ``file``, the nearest first.

    Raises:
        Refused: there is none, e.g. because ``file`` is not a Python file of this repository.
    """
    tests = [test for folder in TIERS for test in sorted((root / folder).rglob("test_*.py"))]
    mirrored = f"_{Path(file).stem}"  # test_trainer.py, test_amp_trainer.py
    found = [
        (steps, not test.stem.endswith(mirrored), str(test.relative_to(root)))
        for test in tests
        if (steps := distance(test, root / file, root)) is not None
    ]
    if not found:
        raise Refused(f"{file}: no test's imports lead to it; name its tests")
    return tuple(test for _, _, test in sorted(found))
