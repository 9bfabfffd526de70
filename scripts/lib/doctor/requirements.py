"""Which packages the doctor needs of the Python that it runs in: ``python -m lib.doctor.requirements [VERL]``.

Exit code 0: this Python, 3.10 or later, has them; 1: one line on stderr names what is missing. Without VERL, the folder
that contains ``verl/``, this Python needs a verl of its own.
"""

from __future__ import annotations  # an older Python is to be told so, not to stumble

import importlib.util
import sys
from pathlib import Path

from lib.patches.precision_module import precision_file

PYTHON = (3, 10)


def missing(verl: Path | None) -> list[str]:
    """Return what this Python lacks, as names of packages; ``verl`` is where a verl is that is not this Python's."""
    if sys.version_info < PYTHON:
        return [f"Python {'.'.join(map(str, PYTHON))}"]
    spec = None if verl else importlib.util.find_spec("verl")
    if spec:
        verl = Path(spec.submodule_search_locations[0]).parent
    names = {"hydra": "hydra-core", "omegaconf": "omegaconf"}
    if verl is None:
        names["verl"] = "verl"
    elif precision_file(verl):  # the patched tree's own package, which the doctor loads
        names["torch"] = "torch (for a patched verl)"
    return [name for module, name in names.items() if importlib.util.find_spec(module) is None]


if __name__ == "__main__":
    lacking = missing(Path(sys.argv[1]) if sys.argv[1:] else None)
    sys.exit(f"{sys.executable} lacks {', '.join(lacking)}, which the doctor needs" if lacking else 0)
