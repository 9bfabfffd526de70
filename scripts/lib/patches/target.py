"""Find the tree to patch, and lock it."""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lib.errors import Refused
from lib.patches.git_objects import package_blobs
from lib.patches.releases import VERL, Framework

# A framework's version file contains nothing but the version, or assigns it.
VERSION = re.compile(r"""^(?:__version__ = )?(["']?)(\d[\w.+!-]*)\1\s*$""", re.M)


@dataclass(frozen=True)
class Target:
    """A tree to patch: ``root`` is the folder that contains the framework's package."""

    root: Path
    framework: Framework

    @property
    def stamp(self) -> Path:
        return self.root / self.framework.stamp

    @property
    def bookkeeping(self) -> Path:
        return self.root / self.framework.bookkeeping

    @property
    def record(self) -> Path:
        return self.bookkeeping / "record.json"

    @property
    def variable(self) -> str:
        """The make variable with which this target is given, such as ``VERL=/path``."""
        return f"{self.framework.name.upper()}={self.root}"

    @property
    def version(self) -> str | None:
        """The version that the package states; None where it has no version file, or one without a version."""
        file = self.root / self.framework.version_file
        version = VERSION.search(file.read_text()) if file.exists() else None
        return version[2] if version else None

    def staged(self, path: str) -> Path:
        """Return where the new content of ``path`` is staged."""
        return self.bookkeeping / f"new+{path.replace('/', '+')}"

    def original(self, path: str) -> Path:
        """Return where the original of ``path`` is kept."""
        return self.bookkeeping / f"old+{path.replace('/', '+')}"

    def blobs(self) -> dict[str, str]:
        """Return the blob id of each file of the package, by path."""
        return package_blobs(self.root, self.framework)


def find_target(path: Path, *frameworks: Framework) -> Target:
    """Return the target at ``path``, which contains, or is, the package of exactly one of ``frameworks``.

    Raises:
        Refused: it contains none of them, or several.
    """
    targets = []
    for framework in frameworks:
        for root in (path, path.parent):
            package = root / framework.name
            if (package / "__init__.py").is_file() and package in (path, path / framework.name):
                targets.append(Target(root, framework))
                break
    if len(targets) == 1:
        return targets[0]
    if targets:
        names = [target.framework.name for target in targets]
        raise Refused(f"{path} contains {' and '.join(names)}; choose one: --framework {' or '.join(names)}")
    names = [framework.name for framework in frameworks]
    missing = f"contains no {' or '.join(f'{name}/__init__.py' for name in names)}"
    kinds = f"a checkout of {' or '.join(names)}, an unpacked release or a site-packages folder"
    raise Refused(f"{path} {missing if path.is_dir() else 'is not a folder'}; give {kinds}")


@contextlib.contextmanager
def locked(path: Path, framework: Framework = VERL) -> Iterator[Target]:
    """Lock the target's package for this process; the lock goes with the process, however that ends."""
    target = find_target(Path(os.path.abspath(path)), framework)
    folder = os.open(target.root / framework.name, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield target
    finally:
        os.close(folder)
