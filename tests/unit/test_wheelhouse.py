"""``make wheelhouse``: wheels of a lock in pieces with checksums, and an environment that is made of them offline."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl_precision.commands import setup_env, wheelhouse
from verl_precision.errors import Refused
from verl_precision.wheelhouse import MANIFEST, Wheelhouse, pack, unpack

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = ["zipp==3.23.0", "markupsafe==3.0.3", "antlr4-python3-runtime==4.9.3"]  # pure, compiled, without a wheel


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheelhouse")
    pack(Wheelhouse("cpu", VERSION, setup_env.ENVIRONMENTS["cpu"].locks, [], {}), PACKAGES, folder, 64 * 1024, [])
    return folder


@pytest.mark.subprocess
def test_pieces_become_an_environment_without_an_index(packed, tmp_path, monkeypatch):
    assert len(list(packed.glob("piece-*"))) > 2 and not list(packed.glob("*/"))
    assert unpack(packed, tmp_path / "wheels").python == VERSION
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    environment = setup_env.Environment(str(tmp_path / "venv"), ("cpu.torch", "cpu.lock"), "", patched=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    setup_env.install(environment, tmp_path / "wheels")
    setup_env.check_present(environment, ["zipp"])
    with pytest.raises(Refused, match="^WHEELHOUSE: was packed without ray, torch, which the Python"):
        setup_env.check_present(environment, ["torch", "zipp", "ray"])
    subprocess.run([environment.python, "-c", "import antlr4, zipp, markupsafe._speedups"], check=True)


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda folder: (folder / "piece-001").unlink(), r"lacks piece-001 of \d+ pieces"),
        (lambda folder: (folder / "piece-000").write_bytes(b"cut"), f"piece-000: not the sha256 of {MANIFEST}"),
        (lambda folder: (folder / MANIFEST).unlink(), f"contains no {MANIFEST}"),
        (lambda folder: (folder / MANIFEST).write_text("{}"), f"{MANIFEST} is damaged"),
        (lambda folder: None, "is for DEVICE=cpu and PYTHON=python.*, not for cuda and Python"),
    ],
    ids=["lost", "damaged", "unfinished", "no manifest", "another"],
)
def test_damaged_or_other_wheelhouse_is_refused(packed, tmp_path, fault, message):
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in packed.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    fault(folder)
    with pytest.raises(Refused, match=f"^WHEELHOUSE={folder}: {message}"):
        setup_env.unpack_for("cuda", VERSION, folder, tmp_path / "wheels")


def test_packages_that_the_machine_has_are_left_out(tmp_path):
    present = tmp_path / "present.txt"
    present.write_text("Torch==2.11.0+cu130\nnvidia_cublas @ file:///x\nverl==0.9.1\n# ray\n")
    request = wheelhouse.parse([f"DIR={tmp_path / 'new'}", f"PRESENT={present}"])
    locks = setup_env.ENVIRONMENTS["cuda"].locks
    assert request.wheelhouse == Wheelhouse("cuda", "3.12", locks, ["nvidia-cublas", "torch"], {})
    assert request.requirements["ray"].startswith("ray==") and "torch" not in request.requirements
    assert wheelhouse.parse(["DIR=/new", "DEVICE=cpu"]).requirements["torch"] == "torch==2.13.0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "DIR: is not set; example"),
        ("DIR=.", "DIR=.: must be a new or an empty folder"),
        ("DIR=/new DEVICE=rocm", "DEVICE=rocm: must be one of cpu, cuda"),
        ("DIR=/new PYTHON_VERSION=3.10", "PYTHON_VERSION=3.10: must be one of 3.11, 3.12"),
        ("DIR=/new PIECE=0", "PIECE=0: must be a whole number of at least 1"),
        ("DIR=/new PRESENT=/no", "PRESENT=/no: is not a file"),
    ],
)
def test_bad_words_are_refused(words, message):
    with pytest.raises(Refused, match=f"^{message}"):
        wheelhouse.parse(words.split())
