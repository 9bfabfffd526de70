"""The patch tool, and all modules that run in another verl's environment, on every supported Python: 3.10 and later.

The Pythons are those on PATH and pyenv's; tests of one that this machine lacks are skipped with its version.
"""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from support.trees import contents

from lib.patches.releases import FRAMEWORKS, OAT, VERL, Framework, load_releases
from lib.patches.wheels import unpacked_wheel
from lib.paths import REPO

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
NEWEST = [(VERL, "0.9.1"), (OAT, "0.2.4")]
# The project's modules that are imported in verl's own environment, whose packages this test does without.
MODULES = [
    "bench",
    "command",
    "compare",
    "doctor",
    "matrix",
    "mutants",
    "patchset",
    "plan_memory",
    "pr_branch",
    "preflight",
    "probe",
    "report",
    "setup_env",
    "lib.run.job",
    "lib.run.start_checks",
    "lib.run.cluster",
]


@cache
def interpreter(version: str) -> Path:
    """Return the Python of this version; skip the test if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    beside = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    for found in [shutil.which(f"python{version}"), *beside]:
        asked = [str(found), "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"]
        # pyenv's shim is on PATH for every version and fails for those that are not selected
        answer = subprocess.run(asked, capture_output=True, text=True).stdout if found else ""
        if answer.startswith(f"{version} "):
            return Path(answer.split(maxsplit=1)[1].strip())
    pytest.skip(f"no Python {version} on PATH or in {pyenv}")


def run(version: str, *words: object, **options) -> str:
    """Run the Python with only the standard library available and return its output."""
    line = [str(word) for word in (interpreter(version), "-S", "-B", *words)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=REPO / "scripts", **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=NEWEST, ids=lambda newest: newest[0].name)
def wheel(request, tmp_path_factory) -> tuple[Framework, str, Path]:
    """A framework, its newest release and the pristine tree of it."""
    framework, release = request.param
    return framework, release, unpacked_wheel(release, tmp_path_factory.mktemp("pristine"), framework)


@pytest.fixture(scope="module")
def expected(wheel, tmp_path_factory) -> tuple[str, dict[str, bytes | None]]:
    """The output of this Python's apply, and the tree that it produces."""
    framework, _, pristine = wheel
    tree = tmp_path_factory.mktemp("expected") / "tree"
    shutil.copytree(pristine, tree)
    line = [sys.executable, "scripts/patchset.py", "apply", tree]
    printed = subprocess.run(line, cwd=REPO, capture_output=True, text=True, check=True).stdout
    assert (tree / framework.stamp).is_file()
    return printed.replace(str(tree), "TREE"), contents(tree)


@pytest.mark.parametrize("python", PYTHONS)
def test_apply_makes_the_same_tree_on_every_python(python, wheel, expected, tmp_path):
    framework, release, pristine = wheel
    tree, tool = tmp_path / "tree", "patchset.py"
    shutil.copytree(pristine, tree)
    assert run(python, tool, "status", tree).startswith(f"pristine: {framework.name} {release}")
    printed = run(python, tool, "apply", tree).replace(str(tree), "TREE")
    assert (printed, contents(tree)) == expected
    assert run(python, tool, "status", tree).startswith(f"patched: {framework.name} {release}")
    run(python, tool, "drift", tree)
    run(python, tool, "unapply", tree)
    assert contents(tree) == contents(pristine)
    assert ": ok" in run(python, tool, "check", "--framework", framework.name, "--release", release)


@pytest.mark.parametrize("python", PYTHONS)
def test_modules_import_with_only_the_standard_library(python):
    run(python, "-c", f"import {', '.join(MODULES)}")
    assert run(python, "-m", "lib.run.job", "PRECISION=fp16", "STEPS=3") == ""
    assert run(python, "-c", "from lib.run import job; print(job.usage())").startswith("  EXPERIMENT")


@pytest.mark.parametrize("python", ["3.6", "3.8", "3.9"])
def test_older_python_is_refused_in_one_line(python):
    line = [str(interpreter(python)), "-S", "-B", "patchset.py", "--help"]
    done = subprocess.run(line, cwd=REPO / "scripts", capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"patchset: Python 3.10 or later is needed; {line[0]} is {python}.")


def test_version_is_checked_before_anything_newer_is_read():
    """Where no older Python is installed: the file parses on one, and refuses one before it imports the project."""
    tool = REPO / "scripts/patchset.py"
    ast.parse(tool.read_text(), feature_version=(3, 6))
    code = f"import runpy, sys; sys.version_info = (3, 9, 18); runpy.run_path({str(tool)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-S", "-B", "-c", code], cwd="/", capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("patchset: Python 3.10 or later is needed; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_versions_toml_is_toml_for_other_readers(framework):
    read = tomllib.loads((framework.home(REPO) / "versions.toml").read_text())
    releases = load_releases(framework=framework)
    assert {name: {key: getattr(releases[name], key) for key in entry} for name, entry in read.items()} == read
    assert list(releases) == list(read)
