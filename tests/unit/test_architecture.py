"""The rules of the tree (docs/explanation/design.md): file sizes, import directions, unique names."""

import ast
import re
import subprocess
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from verl_precision.paths import REPO

LIB = REPO / "scripts/verl_precision"
LIMITS = {"scripts": 500, "recipes": 500, "patches": 500, "tests": 600}  # lines of a Python file, by its first folder
# Below the commands: a room may import those after its colon, `facts`, the modules at the top, and itself.
ROOMS = {
    "facts": set(),
    "patch": set(),
    "run": {"patch"},
    "doctor": {"patch", "run"},
    "probe": {"run"},
    "report": {"run"},
    "bench": set(),
    "kernels": set(),
    "verify": {"patch", "run"},
}
ROOMS["commands"] = set(ROOMS)
STARTERS = ("cli", "make")  # modules at the top that import rooms: they start the commands


def tracked(*paths: str, suffix: str = ".py") -> list[Path]:
    """Return the project's files below these paths, committed or about to be."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    names = subprocess.run(listed, cwd=REPO, capture_output=True, text=True, check=True).stdout.split()
    return [REPO / name for name in names if name.endswith(suffix) and (REPO / name).exists()]


def lines(files: list[Path], prefix: str = "") -> int:
    """Return the number of lines of all files that begin with ``prefix``."""
    return sum(line.startswith(prefix) for file in files for line in file.read_text().splitlines())


def imports(file: Path) -> set[str]:
    """Return the dotted names of all modules, and names in modules, that a file imports at any depth."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def module_name(file: Path) -> str:
    """Return the name by which the project imports a file of scripts/ or recipes/."""
    root = REPO / "scripts" if file.is_relative_to(REPO / "scripts") else REPO
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """Return the package of scripts/verl_precision that a module is in; empty for those at its top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (LIB / parts[1]).is_dir() else ""


@pytest.mark.parametrize("folder", LIMITS)
def test_files_stay_within_their_limit(folder):
    lengths = {str(file.relative_to(REPO)): lines([file]) for file in tracked(folder)}
    assert {name: length for name, length in lengths.items() if length > LIMITS[folder]} == {}


def test_test_files_have_names_of_their_own():
    """pytest imports them by these names, and refuses the second file of a name when it collects all folders."""
    names = [file.name for file in tracked("tests") if file.name not in ("conftest.py", "__init__.py")]
    assert [name for name in sorted(names) if names.count(name) > 1] == []


def test_rooms_import_only_the_rooms_below_them():
    assert set(ROOMS) == {folder.name for folder in LIB.iterdir() if folder.is_dir() and folder.name != "__pycache__"}
    wrong = []
    for file in tracked("scripts/verl_precision"):
        here = room(module_name(file))
        targets = {room(name) for name in imports(file) if name.startswith("verl_precision.")} - {"", here}
        allowed = ROOMS[here] | {"facts"} if here else set(ROOMS) if file.stem in STARTERS else set()
        wrong += [f"{module_name(file)} imports verl_precision.{target}" for target in sorted(targets - allowed)]
    assert wrong == []


def test_modules_import_each_other_without_a_cycle():
    modules = {module_name(file): file for file in tracked("scripts/verl_precision", "recipes")}
    graph = {name: imports(file) & modules.keys() - {name} for name, file in modules.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError


def defined_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines itself, not those that it imports."""
    nodes = list(ast.walk(tree))
    definitions = {each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    return definitions | {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def test_names_are_imported_from_the_module_that_defines_them():
    files = tracked("scripts", "recipes")
    trees = {module_name(file): ast.parse(file.read_text()) for file in files if file.stem != "__init__"}
    names = {module: defined_names(tree) for module, tree in trees.items()}
    wrong = []
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in names:
                passed_on = {alias.name for alias in node.names} - names[node.module]
                wrong += [f"{module} imports {name} from {node.module}" for name in sorted(passed_on)]
    assert wrong == []


def test_imports_are_absolute_recipes_need_no_scripts_and_the_precision_package_nothing_else_of_verl():
    not_allowed = {
        "scripts": r"\.",
        "recipes": r"\.|verl_precision\b",
        "patches/verl/files/verl/utils/precision": r"verl\b",
        "patches/verl/files": r"verl\.utils\.(lora_sync|checkpoint\.manifest)\b",  # of the series fixes
        "patches/verl/fixes": r"verl\b",
    }
    for folder, pattern in not_allowed.items():
        assert [(file, name) for file in tracked(folder) for name in imports(file) if re.match(pattern, name)] == []


def test_a_class_name_occurs_once():
    places = defaultdict(list)
    for file in tracked("scripts", "recipes", "patches/verl/files", "patches/verl/fixes", "patches/oat/files"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(file.relative_to(REPO)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_the_root_is_computed_once():
    computed = {"scripts": r"Path\(__file__\)\.resolve", "tests": r"Path\(__file__\)(?:\.resolve\(\))?.parents\[[23]"}
    files = [file for folder, how in computed.items() for file in tracked(folder) if re.search(how, file.read_text())]
    assert [str(file.relative_to(REPO)) for file in files] == ["scripts/verl_precision/paths.py"]


def test_tests_import_their_helpers_from_support():
    """A file beside the tests of a folder may be imported there, and in no other folder."""
    helpers = defaultdict(set)
    for file in tracked("tests"):
        if not file.is_relative_to(REPO / "tests/support"):
            helpers[file.stem].add(file.parent)
    wrong = []
    for file in tracked("tests"):
        for name in sorted({name.split(".")[0] for name in imports(file)} & helpers.keys()):
            if name.startswith(("test_", "conftest")) or file.parent not in helpers[name]:
                wrong.append(f"{file.relative_to(REPO)} imports {name}")
    assert wrong == []
