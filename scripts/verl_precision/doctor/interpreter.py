"""Find the Python to run the doctor in: that of the examined verl, if it has the packages.

``python -m verl_precision.doctor.interpreter [VERL]`` checks one. Exit code 0: this Python, 3.10 or later, has them;
1: one line on stderr names what is missing. Without VERL, the folder that contains ``verl/``, it needs its own verl.
"""

from __future__ import annotations  # an older Python has to get as far as the refusal

import os
import shutil
import subprocess
import sys
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.facts.packages import missing_packages, package_folder
from verl_precision.patch.precision_module import precision_file
from verl_precision.paths import SCRIPTS

PYTHON = (3, 10)


def find_interpreter(verl: Path | None, python: str | None, instead: str = "") -> str | None:
    """Return the first Python that has what the doctor needs, or None; print on stderr what a Python lacks.

    Args:
        verl: the folder of a verl. If it lies in a site-packages folder, the Python of that environment comes first.
        python: the Python that the user named, which comes next.
        instead: what to do instead of installing the packages, if another Python must not replace these.

    Raises:
        Refused: ``instead`` is given and no Python that is there has what the doctor needs, or ``python`` is not there.
    """
    if python and not shutil.which(python):
        raise Refused(f"PYTHON={python}: no such program")
    candidates = [python] if python else []
    if verl:
        site = verl.parent if (verl / "__init__.py").exists() else verl
        if (site := site.resolve()).name.endswith("-packages"):
            candidates.insert(0, str(site.parents[2] / "bin/python3"))
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    for candidate in filter(shutil.which, candidates):
        check = [candidate, "-m", __name__, *([str(site)] if verl else [])]
        done = subprocess.run(check, env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return candidate
        if instead and candidate == candidates[-1]:
            named = f"PYTHON={python}" if python else f"VERL={verl}"
            raise Refused(f"{named}: {done.stderr.strip()}, or {instead}")
        print(done.stderr, end="", file=sys.stderr)
    return None


def missing(verl: Path | None) -> list[str]:
    """Return what this Python lacks, as names of packages; ``verl`` contains a verl that is not this Python's."""
    if sys.version_info < PYTHON:
        return [f"Python {'.'.join(map(str, PYTHON))}"]
    if verl is None and (package := package_folder("verl")):
        verl = package.parent
    names = {"hydra": "hydra-core", "omegaconf": "omegaconf"}
    if verl is None:
        names["verl"] = "verl"
    elif precision_file(verl):  # the patched tree's own package, which the doctor loads
        names["torch"] = "torch (for a patched verl)"
    return [names[module] for module in missing_packages(names)]


if __name__ == "__main__":
    lacking = missing(Path(sys.argv[1]) if sys.argv[1:] else None)
    line = f"{sys.executable} lacks {', '.join(lacking)}, which the doctor needs"
    if sys.version_info >= PYTHON:
        line += f": {sys.executable} -m pip install {' '.join(name.split()[0] for name in lacking)}"
    sys.exit(line if lacking else 0)
