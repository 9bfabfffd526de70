"""``make wheelhouse``: the wheels of a lock with their checksums, and an environment that is made of them offline."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_precision.commands import setup_env, wheelhouse
from verl_precision.commands.setup_env import MANIFEST
from verl_precision.errors import Refused

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = ["zipp==3.23.0", "markupsafe==3.0.3", "antlr4-python3-runtime==4.9.3"]  # pure, compiled, without a wheel


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheelhouse")
    (lock := tmp_path_factory.mktemp("requirements") / "cpu.lock").write_text("\n".join(PACKAGES))
    assert wheelhouse.pack(wheelhouse.Wheelhouse("cpu", VERSION, [lock], folder), []) == len(PACKAGES)
    return folder


@pytest.mark.subprocess
def test_wheels_become_an_environment_without_an_index(packed, tmp_path, monkeypatch):
    assert {path.suffix for path in packed.iterdir()} == {".whl", ".json"}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    environment = setup_env.Environment(str(tmp_path / "venv"), ("cpu.torch", "cpu.lock"), "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    setup_env.install(environment, setup_env.wheels_of("cpu", VERSION, packed))
    subprocess.run([environment.python, "-c", "import antlr4, zipp, markupsafe._speedups"], check=True)


def first_wheel(folder: Path) -> Path:
    return min(folder.glob("*.whl"))


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("cpu", lambda folder: first_wheel(folder).unlink(), r"lacks antlr4.*\.whl of 3 wheels"),
        (
            "cpu",
            lambda folder: first_wheel(folder).write_bytes(b"cut"),
            rf"antlr4.*\.whl: not the sha256 of {MANIFEST}",
        ),
        ("cpu", lambda folder: (folder / MANIFEST).unlink(), f"contains no {MANIFEST}"),
        ("cpu", lambda folder: (folder / MANIFEST).write_text("{}"), f"{MANIFEST} is damaged"),
        ("cuda", lambda folder: None, "is for DEVICE=cpu and PYTHON=python.*, not for cuda and Python"),
    ],
    ids=["lost", "damaged", "unfinished", "no manifest", "another"],
)
def test_damaged_or_other_wheelhouse_is_refused(packed, tmp_path, name, fault, message):
    fault(folder := shutil.copytree(packed, tmp_path / "copy"))
    with pytest.raises(Refused, match=f"^WHEELHOUSE={folder}: {message}"):
        setup_env.wheels_of(name, VERSION, folder)


@pytest.mark.subprocess
def test_wheelhouse_of_other_requirements_is_refused(packed, monkeypatch):
    monkeypatch.setattr(setup_env.Environment, "locks", "another hash")
    with pytest.raises(Refused, match=f"^WHEELHOUSE={packed}: was packed from other requirements"):
        setup_env.wheels_of("cpu", VERSION, packed)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "DIR: is not set; example"),
        ("DIR=.", "DIR=.: must be a new or an empty folder"),
        ("DIR=/new DEVICE=rocm", "DEVICE=rocm: must be one of cpu, cuda"),
        ("DIR=/new PYTHON_VERSION=3.10", "PYTHON_VERSION=3.10: must be one of 3.11, 3.12"),
    ],
)
def test_bad_words_are_refused(words, message):
    with pytest.raises(Refused, match=f"^{message}"):
        wheelhouse.parse(words.split())
