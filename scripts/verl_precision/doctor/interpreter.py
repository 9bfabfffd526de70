"""Find the Python to run the doctor in, that of the environment of the examined verl, and what a Python lacks."""

from pathlib import Path

from verl_precision.facts.packages import missing_packages
from verl_precision.patch.precision_module import precision_file


def environment_python(verl: Path) -> str | None:
    """Return the Python of the environment whose site-packages contain ``verl``; None where it is in no such folder."""
    site = (verl.parent if (verl / "__init__.py").exists() else verl).resolve()
    python = site.parents[2] / "bin/python3" if site.name.endswith("-packages") else None
    return str(python) if python and python.exists() else None


def missing(root: Path) -> list[str]:
    """Return what this Python lacks to examine the verl in the folder ``root``, as names of packages."""
    names = {"hydra": "hydra-core", "omegaconf": "omegaconf"}
    if precision_file(root):  # the patched tree's own package, which the doctor loads
        names["torch"] = "torch (for a patched verl)"
    return [names[module] for module in missing_packages(names)]
