"""Select the tests of a file by their imports: the test files from which imports lead to it, the nearest first."""

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from verl_precision.errors import Refused

TIERS = ("tests/unit", "tests/engine")  # they need neither another release nor a training job
# A module that a file imports or names in a string, such as that of a process to start, and the names from it.
NAMED = re.compile(r"\b((?:recipes|verl_precision|support|mutants)(?:\.\w+)*)(?: import (\([^)]*\)|.*))?")


@cache
def importers(root: Path) -> dict[Path, set[Path]]:
    """Return for each Python file of the project the files that import it or name it in a string."""
    found = defaultdict(set)
    for file in (each for folder in ("scripts", "recipes", "tests") for each in (root / folder).rglob("*.py")):
        for module, names in NAMED.findall(file.read_text()):
            for name in (module, *(f"{module}.{each}" for each in re.findall(r"\w+", names))):
                for base in (root, root / "scripts", root / "tests"):
                    found[base / f"{name.replace('.', '/')}.py"].add(file)
    return found


def with_helpers(tests: Iterable[Path], root: Path) -> set[Path]:
    """Return the test files, the other files of their folders, tests/conftest.py and the helpers that these import."""
    found = {*tests, root / "tests/conftest.py"}
    cases = (each for test in tests for each in test.parent.glob("*.py"))
    found |= {each for each in cases if not each.name.startswith("test_")}
    helpers = {file: by for file, by in importers(root).items() if file.is_relative_to(root / "tests")}
    while reached := {file for file, by in helpers.items() if by & found and file.is_file()} - found:
        found |= reached
    return found


def select_tests(file: str, root: Path) -> tuple[str, ...]:
    """Return the test files of the quick tiers whose imports lead to ``file``, the nearest first."""
    tests, seen, layer = [], {root / file}, [root / file]
    mirrored = f"_{Path(file).stem}"  # test_trainer.py, test_amp_trainer.py
    while layer:
        layer = sorted(set().union(*(importers(root)[each] for each in layer)) - seen)
        seen |= set(layer)
        paths = [each for each in layer if each.name.startswith("test_")]
        names = [
            str(each.relative_to(root)) for each in sorted(paths, key=lambda each: not each.stem.endswith(mirrored))
        ]
        tests += [name for name in names if name.startswith(TIERS)]
    if not tests:
        raise Refused(f"{file}: no test's imports lead to it; name its tests")
    return tuple(tests)
