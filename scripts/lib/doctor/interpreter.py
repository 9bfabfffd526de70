"""Find the Python to run the doctor in: that of the examined verl, if it has the packages."""

import os
import shutil
import subprocess
from pathlib import Path

from lib.paths import REPO


def find_interpreter(verl: Path | None, python: str | None) -> str | None:
    """Return the first Python that has what the doctor needs, or None.

    Args:
        verl: the folder of a verl. If it lies in a site-packages folder, the Python of that environment comes first.
        python: the Python that the user named, which comes next.
    """
    candidates = [python] if python else []
    if verl:
        site = verl.parent if (verl / "__init__.py").exists() else verl
        if (site := site.resolve()).name.endswith("-packages"):
            candidates.insert(0, str(site.parents[2] / "bin/python3"))
    environment = os.environ | {"PYTHONPATH": str(REPO / "scripts")}
    for candidate in filter(shutil.which, candidates):
        check = [candidate, "-m", "lib.doctor.requirements", *([str(site)] if verl else [])]
        if subprocess.run(check, env=environment).returncode == 0:
            return candidate
    return None
