"""The patch tool, and all modules that run in another verl's environment, on every supported Python: 3.10 and later.

The Pythons are those on PATH and pyenv's; tests of one that this machine lacks are skipped with its version.
"""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.patch_tool import run_command
from support.small_projects import OAT_NEWER, OAT_RELEASE, RELEASE
from support.trees import contents

from verl_precision import cli
from verl_precision.patch.releases import FRAMEWORKS, load_releases
from verl_precision.paths import PACKAGE, REPO

# `make test` runs the oldest and the newest.
PYTHONS = ["3.10", *(pytest.param(version, marks=pytest.mark.slow) for version in ("3.11", "3.12")), "3.13"]
# The project's modules that are imported in verl's own environment, whose packages this test does without.
MODULES = (
    *(cli.find_module(name).__name__.removeprefix("verl_precision.") for name in cli.SUMMARIES),
    *("make", "run.job", "run.checks", "run.cluster"),
)
COMMANDS = (
    "apply verl",
    "apply oat",
    "status verl --json",
    "drift oat",
    "unapply oat",
    f"check --release {RELEASE}",
    f"checkout {RELEASE} tree",
    "export tree",
    f"port --framework oat {OAT_RELEASE} {OAT_NEWER} ported",
)


def interpreter(version: str) -> Path:
    """Return the Python of this version; skip the test if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    beside = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    for found in [*beside, shutil.which(f"python{version}")]:
        asked = [str(found), "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"]
        # pyenv's shim is on PATH for every version and fails for those that are not selected
        answer = subprocess.run(asked, capture_output=True, text=True).stdout if found else ""
        if answer.startswith(f"{version} "):
            return Path(answer.split(maxsplit=1)[1].strip())
    pytest.skip(f"no Python {version} on PATH or in {pyenv}")


@pytest.mark.subprocess
@pytest.mark.parametrize("python", PYTHONS)
def test_patch_tool_gives_the_same_on_every_python(
    python, tiny: Path, pristine: Path, pristine_oat: Path, tmp_path: Path
):
    """What each command prints, and all files that it leaves except git's."""
    outcomes = []
    for each in (Path(sys.executable), interpreter(python)):
        folder = tmp_path / str(len(outcomes))
        for name, source in {"project": tiny, "verl": pristine, "oat": pristine_oat}.items():
            shutil.copytree(source, folder / name)
        printed = []
        for line in COMMANDS:
            done = run_command(folder / "project", *line.split(), python=each, cwd=folder)
            assert done.returncode == 0, (line, done)
            printed.append(done.stdout.replace(str(folder), "FOLDER"))
        files = {path: content for path, content in contents(folder).items() if "/.git/" not in path}
        outcomes.append((printed, files))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("python", PYTHONS)
def test_modules_import_with_only_the_standard_library(python: str):
    modules = ", ".join(f"verl_precision.{name}" for name in MODULES)
    code = f"import {modules}; print(verl_precision.run.job.parse_job(['PRECISION=fp16']).precision)"
    line = [interpreter(python), "-S", "-B", "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, cwd=REPO / "scripts")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == "fp16\n"


def test_version_is_checked_before_anything_newer_is_read():
    """The file parses on an older Python, and refuses it before it imports the project."""
    tool = PACKAGE / "__main__.py"
    ast.parse(tool.read_text(), feature_version=(3, 6))
    code = f"import runpy, sys; sys.version_info = (3, 9, 18); runpy.run_path({str(tool)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-S", "-B", "-c", code], cwd="/", capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("verl-precision: Python 3.10 or later is needed; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_versions_toml_is_toml_for_other_readers(framework):
    read = tomllib.loads((framework.home(REPO) / "versions.toml").read_text())
    releases = load_releases(framework=framework)
    assert {name: {key: getattr(releases[name], key) for key in entry} for name, entry in read.items()} == read
    assert list(releases) == list(read)
