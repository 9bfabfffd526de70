"""The patch tool, and all else that runs beside a verl elsewhere, on every Python that it supports: 3.10 and later.

And the Makefile's choice of one. The Pythons are those on PATH and pyenv's; tests of one that this machine lacks are
skipped with its version.
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
# What is imported of the project where verl's own environment is used, which this test does without.
MODULES = [
    "doctor",
    "matrix",
    "patchset",
    "preflight",
    "probe",
    "compare",
    "lib.run.job",
    "lib.run.admission",
    "lib.run.cluster",
]


@cache
def interpreter(version: str) -> Path:
    """Return the Python of this version; skips the test where there is none."""
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
    """Run the Python with nothing but the standard library in reach and return what it printed."""
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
    """What this Python's apply prints and makes of the tree."""
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
def test_modules_import_with_the_standard_library_alone(python):
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


# --- the Makefile's choice --------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout that nothing is set up in, and beside it the folder of all that is on PATH, without a Python."""
    folder, programs = tmp_path / "checkout", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    for path in ("Makefile", "requirements", "scripts"):
        (folder / path).symlink_to(REPO / path)
    for name in ("bash", "cat", "cksum", "cut", "git", "touch", "ln"):
        (programs / name).symlink_to(shutil.which(name))
    return folder


def add(checkout: Path, name: str, version: str) -> None:
    """Put a Python on PATH under the name."""
    program = checkout.parent / "bin" / name
    if version == "3.9":  # a later one that says so
        code = "import sys; sys.version_info = (3, 9, 18); exec(sys.argv[1])"
        program.write_text(f"#!{shutil.which('bash')}\nexec {sys.executable} -c '{code}' \"$2\"\n")
    else:  # a venv would look for its library beside the link
        program.write_text(f'#!{shutil.which("bash")}\nexec {interpreter(version)} "$@"\n')
    program.chmod(0o755)


def make(checkout: Path, *words: object) -> subprocess.CompletedProcess:
    line = [str(word) for word in (shutil.which("make"), *words, "DEVICE=cpu")]
    environment = {"PATH": str(checkout.parent / "bin")}
    return subprocess.run(line, cwd=checkout, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3": "3.10", "python3.12": "3.12"}, "python3"),
        ({"python3": "3.9", "python3.10": "3.10"}, "python3.10"),
        ({"python3.13": "3.13"}, "python3.13"),
    ],
)
def test_patch_tool_runs_on_the_first_suitable_python(checkout, tmp_path, pythons, chosen):
    for name, version in pythons.items():
        add(checkout, name, version)
    tree = unpacked_wheel("0.2.4", tmp_path / "tree", OAT)
    done = make(checkout, "apply-patches", f"OAT={tree}")
    assert (done.returncode, done.stderr) == (0, "") and "oat 0.2.4: " in done.stdout
    assert f"{chosen} scripts/patchset.py apply" in make(checkout, "--dry-run", "apply-patches", f"OAT={tree}").stdout


@pytest.mark.parametrize(
    ("pythons", "words", "refusal"),
    [
        ({}, ["status"], "Python 3.10 or later is needed"),
        ({"python3": "3.9"}, ["status"], "Python 3.10 or later is needed"),
        ({"python3": "3.11", "old": "3.9"}, ["check", "PYTHON=old"], "PYTHON=old: Python 3.10 or later is needed"),
        ({"python3": "3.10"}, ["run"], "Python 3.11 or 3.12 is needed"),
        ({"python3": "3.13", "python3.13": "3.13"}, ["setup"], "Python 3.11 or 3.12 is needed"),
        ({"python3": "3.11", "new": "3.13"}, ["run", "PYTHON=new"], "PYTHON=new: Python 3.11 or 3.12 is needed"),
        ({"python3": "3.11", "python3.11": "3.9"}, ["test"], "Python 3.11 or 3.12 is needed"),
    ],
)
def test_unsuitable_python_is_refused(checkout, pythons, words, refusal):
    for name, version in pythons.items():
        add(checkout, name, version)
    done = make(checkout, *words)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"{refusal}; install it, or name it: ")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("pythons", "there", "words", "chosen"),
    [
        (["3.11", "3.12"], None, [], "python3.11"),
        (["3.12"], None, [], "python3.12"),
        (["3.11", "3.12"], None, ["PYTHON=python3.12"], "python3.12"),
        (["3.11", "3.12"], "3.12", ["PYTHON=python3.11"], "python3.11"),
        (["3.11", "3.12"], "3.12", [], None),
    ],
)
def test_environment_keeps_its_python(checkout, pythons, there, words, chosen):
    """``there`` is the Python of an environment that is up to date; ``chosen`` the one that a new one is made with."""
    for version in pythons:
        add(checkout, f"python{version}", version)
    if there:
        (checkout / ".venv/bin").mkdir(parents=True)
        (checkout / ".venv/bin/python").symlink_to(interpreter(there))
        locks = b"".join((checkout / "requirements" / name).read_bytes() for name in ("cpu.torch", "cpu.lock"))
        sum_ = subprocess.run(["cksum"], input=locks, capture_output=True, check=True).stdout.split()[0].decode()
        (checkout / f".venv/ready-{there}-{sum_}").touch()
    shown = make(checkout, "--dry-run", "setup", *words).stdout
    if chosen:
        assert f"{chosen} -m venv --clear .venv\n" in shown
        assert f"ln -s lib/{chosen}/site-packages .venv/site-packages\n" in shown
    else:
        assert "-m venv" not in shown
    assert ".venv/bin/python scripts/patchset.py apply --framework verl .venv/site-packages" in shown
