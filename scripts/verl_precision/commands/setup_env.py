"""Set up the environments of this checkout.

cpu      .venv: verl, patched, with vLLM's CPU build
cuda     .venv-cuda: the same for NVIDIA GPUs
workers  .venv-workers: the tests run the workers of every release in it
browser  chromium, in which the tests load a report

An environment that is up to date is left as it is. TORCH_INDEX_URL is a further package index, of torch's CPU builds.
WHEELHOUSE is a folder that ``make wheelhouse`` wrote: the environment is installed from it, without a network.
FLASH_ATTN=no leaves out flash-attn, which takes long to compile; verl's attention is then torch's own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.format import first_three
from verl_precision.parser import Parser
from verl_precision.patch.apply import apply
from verl_precision.paths import REPO
from verl_precision.uv import find_uv
from verl_precision.wheelhouse import Wheelhouse, canonical, unpack
from verl_precision.words import one_of

PYTHONS = ("3.11", "3.12")  # for which the locks are resolved


@dataclass(frozen=True)
class Environment:
    """A virtual environment in ``folder``, made from the files ``requirements`` of requirements/.

    ``cost`` is the disk space and the time that setting it up takes.
    """

    folder: str
    requirements: tuple[str, str]
    cost: str
    patched: bool

    @property
    def path(self) -> Path:
        return REPO / self.folder

    @property
    def python(self) -> Path:
        return self.path / "bin/python"

    @property
    def locks(self) -> str:
        """Return the hash of its requirements."""
        content = b"".join((REPO / "requirements" / name).read_bytes() for name in self.requirements)
        return hashlib.sha256(content).hexdigest()[:12]

    def stamp(self, version: str) -> Path:
        """Return the file that is written last, named after Python and the locks: an outdated environment has none."""
        return self.path / f"ready-{version}-{self.locks}"

    @property
    def ready(self) -> bool:
        """Return whether it is up to date."""
        return any(self.path.glob(self.stamp("*").name))


ENVIRONMENTS = {
    "cpu": Environment(".venv", ("cpu.torch", "cpu.lock"), "4 to 7 GB on disk, about a minute", patched=True),
    "cuda": Environment(
        ".venv-cuda", ("cuda.lock", "cuda.flash-attn"), "flash-attn is compiled unless FLASH_ATTN=no", patched=True
    ),
    "workers": Environment(".venv-workers", ("cpu.torch", "workers.lock"), "2 GB on disk, a minute", patched=False),
}


def setup(name: str, python: str | None = None, advice: str = "", patch: bool = True) -> Path:
    """Make the environment ``name`` unless it is up to date, patch its verl, and return its Python.

    Args:
        python: the Python 3.11 or 3.12 to make it with; by default that of the present environment, or the first on
            PATH. An environment of another version is made anew.
        advice: printed before the installation, if there is one.
        patch: whether to patch its verl, and print what was done.

    Raises:
        Refused: no such Python, an outdated environment is a symbolic link, which others may be using, FLASH_ATTN has
            another value than yes or no, or flash-attn could not be built.
        subprocess.CalledProcessError: an installation failed.
    """
    environment = ENVIRONMENTS[name]
    base, version = find_python([python] if python else [environment.python, *(f"python{each}" for each in PYTHONS)])
    stamp = environment.stamp(version)
    if not stamp.exists():
        if environment.path.is_symlink():
            raise Refused(
                f"{environment.folder} is a symbolic link to an environment that is not up to date; "
                "run make in the checkout that it points to, or remove the link"
            )
        folder = Path(os.environ["WHEELHOUSE"]).expanduser() if os.environ.get("WHEELHOUSE") else None
        files = folder or " and ".join(file.name for file in requested(environment))
        print(f"setting up {environment.folder} from {files}: {environment.cost}, once", flush=True)
        if advice:
            print(advice, flush=True)
        with tempfile.TemporaryDirectory(dir=environment.path.parent) as scratch:
            wheels = Path(scratch, "wheels")
            left_out = unpack_for(name, version, folder, wheels).left_out if folder else []
            system = ["--system-site-packages"] if left_out else []
            subprocess.run([base, "-m", "venv", "--clear", environment.path, *system], check=True)
            (environment.path / "site-packages").symlink_to(f"lib/python{version}/site-packages")
            install(environment, wheels if folder else None)
            check_present(environment, left_out)
        stamp.touch()
    if environment.patched and patch:
        for line in apply(environment.path / "site-packages"):
            print(line, flush=True)
    return environment.python


def requested(environment: Environment) -> list[Path]:
    """Return the files to install the environment from: FLASH_ATTN=no leaves that of flash-attn out.

    Raises:
        Refused: FLASH_ATTN is neither yes nor no.
    """
    values = {"FLASH_ATTN": os.environ.get("FLASH_ATTN") or "yes"}
    wanted = one_of(values, "FLASH_ATTN", ["yes", "no"], "yes")
    files = [REPO / "requirements" / name for name in environment.requirements]
    return [file for file in files if wanted == "yes" or file.suffix != ".flash-attn"]


def find_python(candidates: list[str | Path]) -> tuple[str, str]:
    """Return the real path of the first candidate that is a Python 3.11 or 3.12, and its version.

    Raises:
        Refused: none is.
    """
    code = "import os, sys; print('%d.%d' % sys.version_info[:2], os.path.realpath(sys.executable))"
    for candidate in candidates:
        if program := shutil.which(candidate):
            output = subprocess.run([program, "-c", code], capture_output=True, text=True).stdout
            version, _, path = output.strip().partition(" ")
            if version in PYTHONS:
                return path, version
    named = f"PYTHON={candidates[0]}: " if len(candidates) == 1 else ""
    raise Refused(f"{named}Python 3.11 or 3.12 is needed; install it, or name it: make PYTHON=/path/to/python3.12")


def unpack_for(name: str, version: str, folder: Path, into: Path) -> Wheelhouse:
    """Unpack the wheelhouse of an environment.

    Raises:
        Refused: it is another environment's or for another Python, or it is damaged.
    """
    wheelhouse = unpack(folder, into)
    if name == wheelhouse.device and wheelhouse.locks != ENVIRONMENTS[name].locks:
        raise Refused(f"WHEELHOUSE={folder}: was packed from other requirements than this checkout's; pack it again")
    if (wheelhouse.device, wheelhouse.python) != (name, version):
        needed = f"DEVICE={wheelhouse.device} and PYTHON=python{wheelhouse.python}"
        raise Refused(f"WHEELHOUSE={folder}: is for {needed}, not for {name} and Python {version}")
    return wheelhouse


def check_present(environment: Environment, names: list[str]) -> None:
    """Check that the environment has the packages that its wheelhouse left out.

    Raises:
        Refused: it lacks some: the Python that it was made with does not have them, or a venv has them.
    """
    code = "import importlib.metadata; print(*(each.metadata['Name'] for each in importlib.metadata.distributions()))"
    done = subprocess.run([environment.python, "-c", code], capture_output=True, text=True, check=True)
    if lacking := sorted(set(names) - set(map(canonical, done.stdout.split()))):
        cause = "which the Python that the environment is made with does not have; a venv cannot lend its packages"
        raise Refused(f"WHEELHOUSE: was packed without {first_three(lacking)}, {cause}")


def install(environment: Environment, wheels: Path | None) -> None:
    """Install what the folder ``wheels`` contains with pip, or else the requirements with uv.

    Raises:
        Refused: flash-attn could not be built.
        subprocess.CalledProcessError: another installation failed.
    """
    if wheels:  # on a machine that may have no uv
        pip = [environment.python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*pip, *sorted(wheels.iterdir())], check=True)
        return
    uv, into = find_uv(environment.python), ["--python", environment.python]
    first, *rest = requested(environment)  # torch comes first
    index = os.environ.get("TORCH_INDEX_URL")
    if first.suffix == ".torch":
        extra, (second,) = ["--index", index] if index else [], rest
        uv.pip("install", *into, "-r", first, "-c", second, *extra)
        uv.pip("install", *into, "--no-deps", "-r", second)
        return
    uv.pip("install", *into, "--no-deps", "-r", first)
    for file in rest:
        try:
            uv.pip("install", *into, "--no-deps", "--no-build-isolation", "-r", file)
        except subprocess.CalledProcessError as error:
            raise Refused(f"{file.name}: could not be built; FLASH_ATTN=no leaves flash-attn out") from error


def setup_browser() -> None:
    """Install chromium with apt-get unless it is there.

    Raises:
        Refused: it is not, and this is not root on a Debian.
        subprocess.CalledProcessError: the installation failed.
    """
    if shutil.which("chromium"):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        raise Refused("chromium, in which the tests load a report, is missing; install your system's package chromium")
    print(
        "installing chromium with apt-get for the tests of the report page: 400 MB on disk, a minute, once", flush=True
    )
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    packages = ["chromium", "fonts-dejavu-core"]
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(command, env=quiet, stdout=subprocess.DEVNULL, check=True)


def main(words: list[str]) -> int:
    parser = Parser("verl-precision setup", __doc__)
    parser.add_argument("names", nargs="+", choices=[*ENVIRONMENTS, "browser"], metavar="NAME")
    parser.add_argument("--python", help="Python 3.11 or 3.12 for new environments")
    options = parser.parse_args(words)
    for name in options.names:
        if name == "browser":
            setup_browser()
        else:
            setup(name, options.python)
    return 0
