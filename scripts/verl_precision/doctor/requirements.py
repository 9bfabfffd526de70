"""Check that this Python has what the doctor needs: ``python -m verl_precision.doctor.requirements [VERL]``.

Exit code 0: this Python, 3.10 or later, has it; 1: one line on stderr names what is missing. Without VERL, the folder
that contains ``verl/``, this Python needs a verl of its own.
"""

from __future__ import annotations  # an older Python has to get as far as the refusal

import sys
from pathlib import Path

from verl_precision.facts.packages import missing_packages, package_folder
from verl_precision.patch.precision_module import precision_file

PYTHON = (3, 10)


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
