"""The patch tool, and what else touches a verl of one's own, on every Python that it takes: 3.10 and later.

The Pythons are those on PATH and pyenv's; one that this machine lacks is skipped by name.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from test_patchset import contents

from lib.releases import FRAMEWORKS, OAT, PROJECT, VERL, Framework, load_releases, unpacked_wheel

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
NEWEST = [(VERL, "0.9.1"), (OAT, "0.2.4")]
# What is imported of the project where verl's own environment is used, which this test does without.
MODULES = ["doctor", "matrix", "patchset", "preflight", "probe", "compare", "lib.job", "lib.admission", "lib.cluster"]


@cache
def interpreter(version: str) -> Path:
    """Return the Python of this version; skips the test where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    beside = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    for found in [shutil.which(f"python{version}"), *beside]:
        asked = [str(found), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        # pyenv's shim is on PATH for every version and fails for those that are not selected
        if found and subprocess.run(asked, capture_output=True, text=True).stdout.strip() == version:
            return Path(found)
    pytest.skip(f"no Python {version} on PATH or in {pyenv}")


def run(version: str, *words: object, **options) -> str:
    """Run the Python with nothing but the standard library in reach and return what it printed."""
    line = [str(word) for word in (interpreter(version), "-S", "-B", *words)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=PROJECT / "scripts", **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=NEWEST, ids=lambda newest: newest[0].name)
def wheel(request, tmp_path_factory) -> tuple[Framework, str, Path]:
    """A framework, its newest release and the pristine tree of it."""
    framework, release = request.param
    return framework, release, unpacked_wheel(release, tmp_path_factory.mktemp("pristine"), framework)


@pytest.fixture(scope="module")
def expected(wheel, tmp_path_factory) -> tuple[str, dict[str, bytes | None]]:
    """What this Python's apply prints and makes of the tree."""
    framework, _, pristine = wheel
    tree = tmp_path_factory.mktemp("expected") / "tree"
    shutil.copytree(pristine, tree)
    line = [sys.executable, "scripts/patchset.py", "apply", tree]
    printed = subprocess.run(line, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    assert (tree / framework.stamp).is_file()
    return printed.replace(str(tree), "TREE"), contents(tree)


@pytest.mark.parametrize("python", PYTHONS)
def test_every_python_makes_the_same_tree(python, wheel, expected, tmp_path):
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
def test_the_standard_library_is_enough(python):
    run(python, "-c", f"import {', '.join(MODULES)}")
    assert run(python, "-m", "lib.job", "PRECISION=fp16", "STEPS=3") == ""
    assert run(python, "-c", "from lib import job; print(job.usage())").startswith("  EXPERIMENT")


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_the_releases_are_toml(framework):
    read = tomllib.loads((framework.home(PROJECT) / "versions.toml").read_text())
    releases = load_releases(framework=framework)
    assert {name: {key: getattr(releases[name], key) for key in entry} for name, entry in read.items()} == read
    assert list(releases) == list(read)
