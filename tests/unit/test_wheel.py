"""The wheel of the project, installed by uv beside verl: it patches that verl, and leaves nothing behind."""

import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.patch_tool import AS_A_USER
from support.trees import RELEASE, contents

from verl_precision import __version__
from verl_precision.patch.releases import load_releases
from verl_precision.patch.wheels import wheel
from verl_precision.paths import REPO
from verl_precision.spelling import MADE
from verl_precision.uv import find_uv

pytestmark = pytest.mark.subprocess
UV = find_uv()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The wheel."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([UV.program, "build", "--quiet", "--wheel", "--out-dir", out, REPO], env=UV.environment, check=True)
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory) -> Path:
    """An environment with verl and the wheel, without what verl depends on; its files are links into uv's cache."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([UV.program, "venv", "--quiet", folder / "venv"], env=UV.environment, check=True)
    variables = UV.environment | {"UV_CACHE_DIR": str(folder / "cache"), "VIRTUAL_ENV": str(folder / "venv")}
    install = [UV.program, "pip", "install", "--quiet", "--no-deps", built, wheel(RELEASE)]
    subprocess.run(install, env=variables, check=True)
    return folder


@pytest.fixture
def command(environment, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """``command("apply")``: run the installed command line in an empty folder, with only its own environment."""

    def run(*words: str | Path, before: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess:
        own = {name: value for name, value in os.environ.items() if name not in (MADE, "PYTHONPATH", "VIRTUAL_ENV")}
        line = [*before, environment / "venv/bin/verl-precision", *words]
        return subprocess.run(line, cwd=tmp_path, env=own | variables, capture_output=True, text=True)

    return run


@pytest.fixture
def site(environment) -> Path:
    (folder,) = (environment / "venv/lib").glob("python*/site-packages")
    return folder


def test_wheel_is_pure_python_without_dependencies_or_hooks(built):
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        metadata = archive.read(f"verl_precision-{__version__}.dist-info/METADATA").decode()
    assert built.name == f"verl_precision-{__version__}-py3-none-any.whl" and "Requires-Dist" not in metadata
    project = {name.removeprefix("verl_precision/project/") for name in names}
    assert {
        "CHANGELOG.md",
        "configs/precision/fp16.yaml",
        "recipes/cpu/platform.py",
        "patches/oat/versions.toml",
    } < project
    for release in load_releases():
        assert f"patches/verl/v{release}/series" in project
    assert not [name for name in names if name.endswith((".pth", ".pyc", ".so", ".png")) or "mutants" in name]
    assert {name.split("/")[0] for name in names} == {"verl_precision", f"verl_precision-{__version__}.dist-info"}


def test_installed_command_patches_the_verl_beside_it(command, environment, site, tmp_path):
    verl, cache = contents(site / "verl"), contents(environment / "cache")
    done = command("apply")
    assert done.stderr == f"the verl of {environment}/venv/bin/python: {site}\n"
    assert done.stdout.startswith(f"verl {RELEASE}: ") and contents(site / "verl") != verl
    assert command("status").stdout.startswith(f"patched: verl {RELEASE} with stack ")
    assert "fixes" in command("apply", "--fixes").stdout and "fixes" in command("status").stdout
    assert command("unapply").returncode == 0 and contents(site / "verl") == verl
    assert contents(environment / "cache") == cache, "uv's cache has the wheel's files"
    assert list(tmp_path.iterdir()) == []


def test_installed_command_names_what_its_python_lacks(command, environment, tmp_path):
    for words in (["run", "--device=cpu"], ["probe", "--device=cpu"], ["report", "--from=/tmp"]):
        done = command(*words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert f"{words[0]}: {environment}/venv/bin/python lacks " in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert "bench: is not a command" in command("bench").stderr, "it is of the checkout"


def test_trees_that_cannot_be_patched_are_named_in_one_line(command, environment, site, tmp_path):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl/__init__.py").touch()
    archive = shutil.make_archive(tmp_path / "verl", "zip", tmp_path, "verl")
    refusals = {
        (f"{tmp_path}",): f"may import verl from {tmp_path}, {site}; give one of these folders",
        (archive,): f"may import verl from {archive}, ",
    }
    for (path,), message in refusals.items():
        done = command("apply", PYTHONPATH=path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1) and message in done.stderr
    folders = [site / "verl", *(path for path in (site / "verl").rglob("*") if path.is_dir())]
    shutil.rmtree(tmp_path / "verl")
    for folder in folders:
        folder.chmod(0o555)
    done = command("apply", before=AS_A_USER)
    for folder in folders:
        folder.chmod(0o755)
    assert (
        done.returncode == 1
        and done.stderr.endswith("verl is read-only; nothing was changed\n")
        and done.stderr.count("\n") == 2
    )


def test_uninstalled_package_leaves_nothing(command, environment, site):
    pip = [UV.program, "pip", "uninstall", "--quiet", "--python", environment / "venv/bin/python"]
    subprocess.run([*pip, "verl-precision", "verl"], env=UV.environment, check=True)
    assert {path.name for path in site.iterdir()} <= {"_virtualenv.py", "_virtualenv.pth", "__pycache__"}
    assert not (environment / "venv/bin/verl-precision").exists()
