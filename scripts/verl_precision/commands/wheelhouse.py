"""Pack the wheels of an environment, on Linux x86_64, for machines without a network.

Writes the wheels and that of uv, which installs them. flash-attn, which is compiled, is left out. On the machine
without a network: make setup DEVICE=cuda PYTHON=python3.12 WHEELHOUSE=/media/wheels
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from verl_precision.commands.setup_env import PYTHONS
from verl_precision.errors import Refused
from verl_precision.format import first_three
from verl_precision.paths import REPO
from verl_precision.words import one_of, parse_words

VARIABLES = {
    "DIR": "the new folder for the wheels",
    "DEVICE": "whose environment: cuda (default) or cpu",
    "PYTHON_VERSION": "of the machine without a network: 3.11 or 3.12 (default)",
}
LOCKS = {"cpu": ("cpu.torch", "cpu.lock"), "cuda": ("cuda.lock",)}
# What a manylinux machine of today accepts: pip takes these tags only from the command line for another Python.
# The oldest first: pip prefers the first, and such a wheel fits older machines too.
PLATFORMS = ["manylinux2014_x86_64", *(f"manylinux_2_{glibc}_x86_64" for glibc in range(5, 40)), "linux_x86_64"]


def parse(words: list[str]) -> tuple[str, str, Path]:
    values = parse_words(words, VARIABLES)
    if "DIR" not in values:
        raise Refused("DIR: is not set; example: make wheelhouse DIR=/media/wheels DEVICE=cuda")
    folder = Path(values["DIR"]).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"DIR={values['DIR']}: must be a new or an empty folder")
    python = one_of(values, "PYTHON_VERSION", list(PYTHONS), "3.12")
    return one_of(values, "DEVICE", list(LOCKS), "cuda"), python, folder


def pack(device: str, python: str, folder: Path, pip: list[str]) -> int:
    """Download the wheels with pip and its options ``pip``, build those of pure Python, and return their number."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        found, built = Path(scratch, "found"), Path(scratch, "built")
        fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--prefer-binary", "--dest", found, "uv"]
        fetch += ["--implementation", "cp", "--python-version", python, *pip]
        fetch += [f"--platform={each}" for each in PLATFORMS]
        subprocess.run([*fetch, *(f"-r{REPO}/requirements/{name}" for name in LOCKS[device])], check=True)
        if sources := [path for path in found.iterdir() if path.suffix != ".whl"]:
            build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", built, *pip]
            subprocess.run([*build, *sources], check=True)
        if compiled := [path.name for path in built.glob("*") if not path.stem.endswith("-none-any")]:
            raise Refused(f"{first_three(compiled)}: has no wheel, and was compiled for this machine only")
        wheels = [path for each in (found, built) for path in each.glob("*.whl")]
        if device == "cpu" and any(re.match(r"torch-[^+]*-", path.name) for path in wheels):
            raise Refused("DEVICE=cpu: pip found torch's CUDA build; set TORCH_INDEX_URL to an index of CPU builds")
        for path in wheels:
            path.replace(folder / path.name)
    return len(wheels)


def main(request: tuple[str, str, Path]) -> int:
    device, python, folder = request
    index = os.environ.get("TORCH_INDEX_URL") if device == "cpu" else None
    count = pack(device, python, folder, ["--extra-index-url", index] if index else [])
    print(f"{count} wheels: {folder}")
    print(f"copy the folder, then: make setup DEVICE={device} PYTHON=python{python} WHEELHOUSE=/path/to/{folder.name}")
    return 0
