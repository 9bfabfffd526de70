"""Find the Python to run the doctor in: that of the examined verl, if it has the packages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.paths import SCRIPTS


def find_interpreter(verl: Path | None, python: str | None, instead: str = "") -> str | None:
    """Return the first Python that has what the doctor needs, or None.

    What a Python lacks is printed, on stderr.

    Args:
        verl: the folder of a verl. If it lies in a site-packages folder, the Python of that environment comes first.
        python: the Python that the user named, which comes next.
        instead: where no other Python may stand in for these: what to do instead of an installation.

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
        check = [candidate, "-m", "verl_precision.doctor.requirements", *([str(site)] if verl else [])]
        done = subprocess.run(check, env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return candidate
        if instead and candidate == candidates[-1]:
            named = f"PYTHON={python}" if python else f"VERL={verl}"
            raise Refused(f"{named}: {done.stderr.strip()}, or {instead}")
        print(done.stderr, end="", file=sys.stderr)
    return None
