"""Set up the environments of this checkout.

cpu      .venv: verl, patched, with vLLM's CPU build
cuda     .venv-cuda: the same for NVIDIA GPUs
workers  .venv-workers: the tests run the workers of every release in it

An environment that is up to date is left as it is. TORCH_INDEX_URL is a further package index, of torch's CPU builds.
FLASH_ATTN=no leaves out flash-attn, which takes long to compile; verl's attention is then torch's own. pip's settings
apply: PIP_NO_INDEX=1 PIP_FIND_LINKS=/media/wheels installs from a folder of wheels, without a network.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from verl_precision.errors import Refused
from verl_precision.patch.apply import apply
from verl_precision.paths import REPO
from verl_precision.uv import find_uv
from verl_precision.words import Parser, one_of

PYTHONS = ("3.11", "3.12")  # for which the locks are resolved
FLASH_ATTN = "cuda.flash-attn"


class Environment(NamedTuple):
    """A virtual environment of this checkout."""

    folder: str
    requirements: tuple[str, str]  # files of requirements/, or paths
    cost: str  # disk space and time that setting it up takes
    patched: bool = True

    @property
    def path(self) -> Path:
        return REPO / self.folder

    @property
    def python(self) -> Path:
        return self.path / "bin/python"

    def stamp(self, version: str) -> Path:
        """Return the file that is written last, named after Python and the hash of the requirements.

        An outdated environment has none.
        """
        content = b"".join((REPO / "requirements" / name).read_bytes() for name in self.requirements)
        return self.path / f"ready-{version}-{hashlib.sha256(content).hexdigest()[:12]}"


ENVIRONMENTS = {
    "cpu": Environment(".venv", ("cpu.torch", "cpu.lock"), "4 to 7 GB on disk, about a minute"),
    "cuda": Environment(".venv-cuda", ("cuda.lock", FLASH_ATTN), "flash-attn is compiled unless FLASH_ATTN=no"),
    "workers": Environment(".venv-workers", ("cpu.torch", "workers.lock"), "2 GB on disk, a minute", patched=False),
}


def setup(name: str, python: str | None = None, advice: str = "", patch: bool = True) -> Path:
    """Make the environment ``name`` unless it is up to date, patch its verl, and return its Python."""
    return make_ready(ENVIRONMENTS[name], python, advice, patch)


def make_ready(environment: Environment, python: str | None = None, advice: str = "", patch: bool = True) -> Path:
    """Make an environment unless it is up to date, patch its verl, and return its Python.

    Args:
        python: the Python 3.11 or 3.12 to make it with; by default that of the present environment, or the first on
            PATH. An environment of another version is made anew.
        advice: printed before the installation, if there is one.
        patch: whether to patch its verl, and print what was done.
    """
    base, version = find_python([python] if python else [environment.python, *(f"python{each}" for each in PYTHONS)])
    stamp = environment.stamp(version)
    if not stamp.exists():
        if environment.path.is_symlink():
            what = f"{environment.folder} is a symbolic link to an environment that is not up to date"
            raise Refused(f"{what}; run make in the checkout that it points to, or remove the link")
        files = requested(environment)
        print(f"setting up {environment.folder} from {' and '.join(files)}: {environment.cost}, once", flush=True)
        if advice:
            print(advice, flush=True)
        subprocess.run([base, "-m", "venv", "--clear", environment.path], check=True)
        (environment.path / "site-packages").symlink_to(f"lib/python{version}/site-packages")
        install(environment, files)
        stamp.touch()
    if environment.patched and patch:
        for line in apply(environment.path / "site-packages"):
            print(line, flush=True)
    return environment.python


def requested(environment: Environment) -> list[str]:
    """Return the files to install the environment from: FLASH_ATTN=no leaves that of flash-attn out."""
    wanted = one_of({"FLASH_ATTN": os.environ.get("FLASH_ATTN") or "yes"}, "FLASH_ATTN", ["yes", "no"], "yes")
    return [name for name in environment.requirements if wanted == "yes" or name != FLASH_ATTN]


def find_python(candidates: list[str | Path]) -> tuple[str, str]:
    """Return the real path of the first candidate that is a Python 3.11 or 3.12, and its version."""
    code = "import os, sys; print('%d.%d' % sys.version_info[:2], os.path.realpath(sys.executable))"
    for candidate in candidates:
        if program := shutil.which(candidate):
            output = subprocess.run([program, "-c", code], capture_output=True, text=True).stdout
            version, _, path = output.strip().partition(" ")
            if version in PYTHONS:
                return path, version
    named = f"PYTHON={candidates[0]}: " if len(candidates) == 1 else ""
    raise Refused(f"{named}Python 3.11 or 3.12 is needed; install it, or name it: make PYTHON=/path/to/python3.12")


def install(environment: Environment, files: list[str]) -> None:
    """Install these files of requirements/ with uv. Refuse a file that it cannot install; uv prints why."""
    uv, folder = find_uv(environment.python), REPO / "requirements"
    index = os.environ.get("TORCH_INDEX_URL")
    options = {  # torch comes first, from an index of torch's builds, with the lock as constraints
        ".torch": ["-c", folder / environment.requirements[1], *(["--index", index] if index else [])],
        ".lock": ["--no-deps"],
        ".flash-attn": ["--no-deps", "--no-build-isolation"],
    }
    for name in files:
        try:
            words = ["--compile-bytecode", "--python", environment.python, "-r", folder / name]  # as pip does
            uv.pip("install", *words, *options[Path(name).suffix])
        except subprocess.CalledProcessError as error:
            why = "; FLASH_ATTN=no leaves flash-attn out" if name == FLASH_ATTN else ""
            raise Refused(f"{name}: could not be installed{why}") from error


def main(words: list[str]) -> int:
    parser = Parser("verl-precision setup", __doc__)
    parser.add_argument("names", nargs="+", choices=ENVIRONMENTS, metavar="NAME")
    parser.add_argument("--python", help="Python 3.11 or 3.12 for new environments")
    options = parser.parse_args(words)
    for name in options.names:
        setup(name, options.python)
    return 0
