"""Pack the wheels of an environment for machines without a network.

On a machine with a network, on Linux x86_64:  make wheelhouse DIR=/media/wheels DEVICE=cuda PYTHON_VERSION=3.12
On the machine without one:                    make setup DEVICE=cuda PYTHON=python3.12 WHEELHOUSE=/media/wheels

Writes piece-000, piece-001, … and wheelhouse.json, which contains the sha256 of each piece. The packages that
PRESENT lists are left out: the environment then takes them from the Python that it is made with. flash-attn, which is
compiled, is left out in any case.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from verl_precision.commands.setup_env import ENVIRONMENTS, PYTHONS
from verl_precision.errors import Refused
from verl_precision.paths import REPO
from verl_precision.wheelhouse import Wheelhouse, pack, requirements_of
from verl_precision.words import one_of, parse_words, whole_number

VARIABLES = {
    "DIR": "the new folder for the pieces",
    "DEVICE": "whose environment: cuda (default) or cpu",
    "PYTHON_VERSION": "of the machine without a network: 3.11 or 3.12 (default)",
    "PIECE": "size of a piece in MiB, default 1024",
    "PRESENT": "a file that lists packages which that machine has, such as the output of pip freeze",
}
LOCKS = {"cpu": ("cpu.torch", "cpu.lock"), "cuda": ("cuda.lock",)}


@dataclass(frozen=True)
class Request:
    """What to pack: ``requirements`` by name, and where to."""

    wheelhouse: Wheelhouse
    requirements: dict[str, str]
    folder: Path
    piece: int


def parse(words: list[str]) -> Request:
    """Return what the words request.

    Raises:
        Refused: a variable or its value is not allowed, DIR is in use, or PRESENT is no file.
    """
    values = parse_words(words, VARIABLES)
    if "DIR" not in values:
        raise Refused("DIR: is not set; example: make wheelhouse DIR=/media/wheels DEVICE=cuda")
    folder = Path(values["DIR"]).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"DIR={values['DIR']}: must be a new or an empty folder")
    present = Path(values.get("PRESENT", os.devnull)).expanduser()
    if not present.exists() or present.is_dir():
        raise Refused(f"PRESENT={values['PRESENT']}: is not a file")
    device = one_of(values, "DEVICE", list(LOCKS), "cuda")
    python = one_of(values, "PYTHON_VERSION", list(PYTHONS), "3.12")
    piece = whole_number(values, "PIECE", 1, 1024)
    locked = requirements_of("\n".join((REPO / "requirements" / name).read_text() for name in LOCKS[device]))
    there = requirements_of(present.read_text()).keys() - {"verl"}  # which is patched in the environment itself
    left_out = sorted(locked.keys() & there)
    needed = {name: requirement for name, requirement in locked.items() if name not in there}
    return Request(Wheelhouse(device, python, ENVIRONMENTS[device].locks, left_out, {}), needed, folder, piece * 2**20)


def main(words: list[str]) -> int:
    request = parse(words)
    index = os.environ.get("TORCH_INDEX_URL") if request.wheelhouse.device == "cpu" else None
    pip = ["--extra-index-url", index] if index else []
    packed = pack(request.wheelhouse, request.requirements.values(), request.folder, request.piece, pip)
    print(f"{len(request.requirements)} packages in {len(packed.pieces)} pieces: {request.folder}")
    python = f"PYTHON=python{packed.python}"
    print(
        f"copy the folder, then: make setup DEVICE={packed.device} {python} WHEELHOUSE=/path/to/{request.folder.name}"
    )
    return 0
