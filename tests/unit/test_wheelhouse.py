"""``make wheelhouse``: the wheels of a lock, and an environment that is made of them without an index."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl_precision.commands import setup_env, wheelhouse
from verl_precision.errors import Refused

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = ["zipp==3.23.0", "markupsafe==3.0.3", "antlr4-python3-runtime==4.9.3"]  # pure, compiled, without a wheel


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A checkout whose environment "workers" has these packages."""
    for module in (setup_env, wheelhouse):
        monkeypatch.setattr(module, "REPO", tmp_path)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/cpu.torch").write_text(PACKAGES[0])
    (tmp_path / "requirements/workers.lock").write_text("\n".join(PACKAGES[1:]))
    monkeypatch.setitem(wheelhouse.LOCKS, "cpu", ("cpu.torch", "workers.lock"))
    return tmp_path


@pytest.mark.subprocess
def test_wheels_become_an_environment_without_an_index(checkout, monkeypatch):
    request = wheelhouse.parse([f"DIR={checkout}/wheels", "DEVICE=cpu", f"PYTHON_VERSION={VERSION}"])
    assert wheelhouse.pack(*request, []) == len(PACKAGES) + 1
    names = sorted(path.name.partition("-")[0] for path in (checkout / "wheels").iterdir())
    assert names == ["antlr4_python3_runtime", "markupsafe", "uv", "zipp"]
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX"):  # set by setup
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("WHEELHOUSE", str(checkout / "wheels"))
    monkeypatch.setenv("UV_CACHE_DIR", str(checkout / "cache"))
    python = setup_env.setup("workers", sys.executable)
    subprocess.run([python, "-c", "import antlr4, zipp, markupsafe._speedups"], check=True)

    (checkout / "requirements/workers.lock").write_text("markupsafe==3.0.2\n")
    with pytest.raises(Refused, match=f"could not be installed from WHEELHOUSE=.*, with python{VERSION}"):
        setup_env.setup("workers", sys.executable)
    assert not setup_env.ENVIRONMENTS["workers"].stamp(VERSION).exists(), "packed from other requirements"


def test_folder_without_wheels_is_refused(checkout, monkeypatch):
    monkeypatch.setenv("WHEELHOUSE", str(checkout))
    with pytest.raises(Refused, match=f"^WHEELHOUSE={checkout}: contains no wheels"):
        setup_env.setup("workers", sys.executable)
    assert not (checkout / ".venv-workers").exists()


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
