"""The command ``setup``: the choice of an environment's Python, and when it is created again."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_precision.commands import setup_env
from verl_precision.errors import Refused


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """``on_path("python3.11", python="3.9")``: put stubs of these Pythons on an empty PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(*names: str, **others: str) -> None:
        for name, version in ({name: name.removeprefix("python") for name in names} | others).items():
            program = folder / name
            program.write_text(f"#!/bin/sh\necho {version} {program}\n")
            program.chmod(0o755)

    return put


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The environment "cpu" in an empty checkout, for which stubs of venv and pip create only a folder."""
    monkeypatch.setattr(setup_env, "REPO", tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/cpu.torch").write_text("torch==1\n")
    (tmp_path / "requirements/cpu.lock").write_text("verl==1\n")
    monkeypatch.setattr(setup_env, "apply", lambda root: [f"patched {root}"])
    monkeypatch.setattr(setup_env, "install", lambda environment, files: None)
    run = subprocess.run

    def make_venv(command, **options):
        if command[1:3] != ["-m", "venv"]:
            return run(command, **options)
        shutil.rmtree(command[4], ignore_errors=True)
        (command[4] / "bin").mkdir(parents=True)
        (command[4] / "bin/python").symlink_to(command[0])
        return None

    monkeypatch.setattr(subprocess, "run", make_venv)
    return setup_env.ENVIRONMENTS["cpu"]


def made_with(environment) -> str:
    return (environment.path / "bin/python").resolve().name


@pytest.mark.parametrize(
    ("pythons", "python", "expected"),
    [
        ({"python3.11": "3.11", "python3.12": "3.12"}, None, "3.11"),
        ({"python3.11": "3.11", "python3.12": "3.12"}, "python3.12", "3.12"),
        ({"python3.11": "3.9", "python3.12": "3.12"}, None, "3.12"),
    ],
)
def test_environment_is_made_with_the_first_suitable_python(environment, on_path, pythons, python, expected):
    on_path(**pythons)
    assert setup_env.setup("cpu", python) == environment.python
    assert made_with(environment) == f"python{expected}" and environment.stamp(expected).exists()
    assert (environment.path / "site-packages").readlink() == Path(f"lib/python{expected}/site-packages")


def test_unsuitable_python_is_refused_and_nothing_is_made(environment, on_path):
    on_path("python3.10", "python3.13")
    for python in (None, "python3.13", "/no/such/python"):
        message = "Python 3.11 or 3.12 is needed; install it, or name it: make PYTHON="
        with pytest.raises(Refused, match=f"^PYTHON={python}: {message}" if python else f"^{message}"):
            setup_env.setup("cpu", python)
    assert not environment.path.exists()


def test_environment_keeps_its_python_until_another_is_named_and_is_patched_each_time(environment, on_path, capsys):
    on_path("python3.11", "python3.12")
    setup_env.setup("cpu", "python3.12")
    mark = environment.path / "kept"
    mark.touch()
    setup_env.setup("cpu")
    assert mark.exists() and made_with(environment) == "python3.12"
    assert capsys.readouterr().out.endswith(f"patched {environment.path}/site-packages\n" * 2)
    setup_env.setup("cpu", "python3.11")
    assert not mark.exists() and made_with(environment) == "python3.11"


def test_changed_lock_and_interrupted_setup_start_anew(environment, on_path, monkeypatch):
    on_path("python3.11")
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(setup_env, "install", lambda: "fails")
        setup_env.setup("cpu")
    mark = environment.path / "half"
    for changed in (None, "cpu.lock", "cpu.torch"):
        mark.touch()
        if changed:
            (setup_env.REPO / "requirements" / changed).write_text("verl==2\n")
        setup_env.setup("cpu")
        assert not mark.exists()


@pytest.fixture
def uv(monkeypatch):
    """A stand-in for uv that keeps the words of its calls, and fails on a file that is named in ``fails``."""

    class Recorder:
        def __init__(self):
            self.calls, self.fails = [], ""

        def pip(self, *words):
            self.calls.append(" ".join(map(str, words)).replace(f"{setup_env.REPO}/requirements/", ""))
            if self.fails and self.fails in self.calls[-1]:
                raise subprocess.CalledProcessError(1, ["uv"])

    recorder = Recorder()
    monkeypatch.setattr(setup_env, "find_uv", lambda python: recorder)
    return recorder


@pytest.mark.parametrize(
    ("name", "flash_attn", "expected"),
    [
        ("cpu", "no", ["-r cpu.torch -c cpu.lock --index https://torch", "-r cpu.lock --no-deps"]),
        ("cuda", "", ["-r cuda.lock --no-deps", "-r cuda.flash-attn --no-deps --no-build-isolation"]),
        ("cuda", "no", ["-r cuda.lock --no-deps"]),
    ],
)
def test_locks_are_installed_without_further_packages(monkeypatch, uv, name, flash_attn, expected):
    monkeypatch.setenv("FLASH_ATTN", flash_attn)
    monkeypatch.setenv("TORCH_INDEX_URL", "https://torch")
    environment = setup_env.ENVIRONMENTS[name]
    setup_env.install(environment, setup_env.requested(environment))
    assert uv.calls == [f"install --compile-bytecode --python {environment.python} {words}" for words in expected]


def test_flash_attn_that_cannot_be_built_is_named_with_the_way_to_do_without(monkeypatch, uv):
    uv.fails = "cuda.flash-attn"
    with pytest.raises(Refused, match="^cuda.flash-attn: could not be installed; FLASH_ATTN=no leaves flash-attn out"):
        setup_env.install(setup_env.ENVIRONMENTS["cuda"], ["cuda.lock", "cuda.flash-attn"])
    monkeypatch.setenv("FLASH_ATTN", "maybe")
    with pytest.raises(Refused, match="^FLASH_ATTN=maybe: must be one of yes, no"):
        setup_env.requested(setup_env.ENVIRONMENTS["cuda"])
    monkeypatch.setenv("FLASH_ATTN", "no")
    assert setup_env.requested(setup_env.ENVIRONMENTS["cuda"]) == ["cuda.lock"]


def test_linked_environment_that_is_outdated_is_left_alone(environment, on_path, tmp_path):
    on_path("python3.11")
    (tmp_path / "shared").mkdir()
    environment.path.symlink_to(tmp_path / "shared")
    with pytest.raises(Refused, match="^.venv is a symbolic link to an environment that is not up to date"):
        setup_env.setup("cpu")
    assert environment.path.is_symlink() and not any(environment.path.iterdir())


@pytest.mark.subprocess
def test_environment_is_made_of_a_folder_of_wheels_without_an_index(monkeypatch, tmp_path):
    """Follow docs/how-to/cluster.md with a pure package, a compiled one, and one without a wheel."""
    monkeypatch.setattr(setup_env, "REPO", tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/cpu.torch").write_text("zipp==3.23.0")
    lock = tmp_path / "requirements/workers.lock"
    lock.write_text("markupsafe==3.0.3\nantlr4-python3-runtime==4.9.3\n")
    collect = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path / "wheels", "uv"]
    subprocess.run([*collect, "-r", tmp_path / "requirements/cpu.torch", "-r", lock], check=True)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    python = setup_env.setup("workers", sys.executable)
    subprocess.run([python, "-c", "import antlr4, zipp, markupsafe._speedups"], check=True)

    lock.write_text("markupsafe==3.0.2\n")
    with pytest.raises(Refused, match="^workers.lock: could not be installed"):
        setup_env.setup("workers", sys.executable)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert not setup_env.ENVIRONMENTS["workers"].stamp(version).exists(), "the wheels are of other requirements"
