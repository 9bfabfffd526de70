"""Pack the wheels of an environment into pieces with checksums, and unpack them on a machine without a network.

Runs on the standard library and pip alone.
"""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.files import sha256, write_json
from verl_precision.format import first_three

MANIFEST = "wheelhouse.json"  # written last
# What a manylinux machine of today accepts: pip takes these tags from the command line alone for another Python.
# The oldest first: pip prefers the first, and such a wheel fits older machines too.
PLATFORMS = ["manylinux2014_x86_64", *(f"manylinux_2_{glibc}_x86_64" for glibc in range(5, 40)), "linux_x86_64"]


@dataclass(frozen=True)
class Wheelhouse:
    """The contents of a folder that ``pack`` wrote.

    Args:
        device: cpu or cuda: the environment whose wheels these are.
        python: the version of Python that they are for, such as 3.12.
        locks: the hash of the requirements that were packed.
        left_out: names of the environment's packages that the machine has itself.
        pieces: sha256 of each piece by the name of its file, in order.
    """

    device: str
    python: str
    locks: str
    left_out: list[str]
    pieces: dict[str, str]


def canonical(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements_of(text: str) -> dict[str, str]:
    """Return by canonical name the requirement of each line, as in a lock or the output of ``pip freeze``."""
    lines = (re.match(r"([A-Za-z0-9][\w.-]*)[^#]*", line) for line in text.splitlines())
    return {canonical(found[1]): found[0].strip() for found in lines if found}


def pack(wheelhouse: Wheelhouse, requirements: Iterable[str], folder: Path, piece: int, pip: list[str]) -> Wheelhouse:
    """Download the wheels of ``requirements`` and write them into ``folder`` as pieces of ``piece`` bytes.

    Args:
        pip: further options of pip, such as an index.

    Raises:
        Refused: a package has no wheel for that Python, and its source contains code that is compiled; or torch's
            CUDA build was found for the CPU.
        subprocess.CalledProcessError: pip failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheels = download(requirements, wheelhouse.python, Path(scratch, "wheels"), pip)
        if wheelhouse.device == "cpu" and any(re.match(r"torch-[^+]*-", wheel.name) for wheel in wheels):
            raise Refused(
                "DEVICE=cpu: pip found torch's CUDA build; set TORCH_INDEX_URL to the index of its CPU builds"
            )
        archive = Path(scratch, "wheels.tar")
        with tarfile.open(archive, "w") as tar:
            for wheel in wheels:
                tar.add(wheel, wheel.name)
        pieces = {}
        with archive.open("rb") as content:
            for number, part in enumerate(iter(lambda: content.read(piece), b"")):
                path = Path(scratch, f"piece-{number:03d}")
                path.write_bytes(part)
                pieces[path.name] = sha256(path)
        for name in pieces:
            Path(scratch, name).replace(folder / name)
    packed = replace(wheelhouse, pieces=pieces)
    write_json(folder / MANIFEST, asdict(packed))
    return packed


def download(requirements: Iterable[str], python: str, folder: Path, pip: list[str]) -> list[Path]:
    """Return the wheels of ``requirements`` for a Python on Linux, downloaded into ``folder``, sorted by path."""
    folder.mkdir()
    listed = folder.with_suffix(".txt")
    listed.write_text("\n".join(requirements) + "\n")
    fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--prefer-binary", "--dest", folder, "-r", listed]
    fetch += ["--implementation", "cp", "--python-version", python, *(f"--platform={each}" for each in PLATFORMS)]
    subprocess.run([*fetch, *pip], check=True)
    sources = [path for path in folder.iterdir() if path.suffix != ".whl"]
    if sources:
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "built"]
        subprocess.run([*build, *pip, *sources], check=True)
        built = list((folder / "built").iterdir())
        if compiled := [wheel.name for wheel in built if not wheel.stem.endswith("-none-any")]:
            raise Refused(f"{first_three(compiled)}: has no wheel, and this machine compiled it; add it to PRESENT")
    return sorted(folder.rglob("*.whl"))


def unpack(folder: Path, into: Path) -> Wheelhouse:
    """Join the pieces in ``folder``, put the wheels into the new folder ``into``, and return what they are.

    Raises:
        Refused: ``folder`` contains no wheelhouse, or a piece is missing or damaged; nothing was written.
    """
    if not (folder / MANIFEST).exists():
        raise Refused(f"WHEELHOUSE={folder}: contains no {MANIFEST}, which make wheelhouse writes last")
    try:
        wheelhouse = Wheelhouse(**json.loads((folder / MANIFEST).read_text()))
    except (ValueError, TypeError) as error:
        raise Refused(f"WHEELHOUSE={folder}: {MANIFEST} is damaged or of another version; copy it again") from error
    lost = [name for name in wheelhouse.pieces if not (folder / name).exists()]
    if lost:
        raise Refused(f"WHEELHOUSE={folder}: lacks {first_three(lost)} of {len(wheelhouse.pieces)} pieces")
    damaged = [name for name, expected in wheelhouse.pieces.items() if sha256(folder / name) != expected]
    if damaged:
        raise Refused(f"WHEELHOUSE={folder}: {first_three(damaged)}: not the sha256 of {MANIFEST}; copy it again")
    into.mkdir(parents=True)
    with tempfile.TemporaryFile(dir=into.parent) as joined:
        for name in wheelhouse.pieces:
            joined.write((folder / name).read_bytes())
        joined.seek(0)
        with tarfile.open(fileobj=joined) as tar:
            for member in tar:
                with (into / Path(member.name).name).open("wb") as wheel:
                    shutil.copyfileobj(tar.extractfile(member), wheel)
    return wheelhouse
