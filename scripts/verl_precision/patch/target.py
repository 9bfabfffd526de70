"""Find the tree to patch, and lock it."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.facts.packages import package_folder
from verl_precision.patch.git_objects import package_blobs
from verl_precision.patch.open_tree import FOLDER, OpenTree
from verl_precision.patch.releases import VERL, Framework

# A framework's version file contains nothing but the version, or assigns it.
VERSION = re.compile(r"""^(?:__version__ = )?(["']?)(\d[\w.+!-]*)\1\s*$""", re.M)

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # raised by Lustre mounted without flock


@dataclass(frozen=True)
class Target:
    """A tree to patch."""

    root: Path  # contains the framework's package
    framework: Framework
    tree: OpenTree | None = None  # changes it; None unless this process has locked it

    @property
    def stamp(self) -> Path:
        return self.root / self.framework.stamp

    @property
    def bookkeeping(self) -> Path:
        return self.root / self.framework.bookkeeping

    @property
    def staging(self) -> Path:
        return self.root / self.framework.staging

    @property
    def installed(self) -> bool:
        """Whether the package is there; apply's files remain after ``pip uninstall``."""
        return (self.root / self.framework.name / "__init__.py").is_file()

    @property
    def record(self) -> Path:
        return self.bookkeeping / "record.json"

    @property
    def variable(self) -> str:
        """The make variable with which this target is given, such as ``VERL=/path``."""
        return f"{self.framework.name.upper()}={shlex.quote(str(self.root))}"

    @property
    def version(self) -> str | None:
        file = self.root / self.framework.version_file
        version = VERSION.search(file.read_text()) if file.exists() else None
        return version[2] if version else None

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def staged(self, path: str) -> Path:
        return self.bookkeeping / f"new+{path.replace('/', '+')}.kept"

    def original(self, path: str) -> Path:
        return self.bookkeeping / kept_name(path)

    def original_file(self, path: str) -> Path:
        """Return the file with the content of the original of ``path``, which may be kept as a link."""
        kept = self.original(path)
        return ((self.root / path).parent / os.readlink(kept)).resolve() if kept.is_symlink() else kept

    def read_stamp(self) -> dict[str, str] | None:
        """Return the content of the stamp, which apply must have written; None if there is none."""
        if not self.stamp.is_file():
            return None
        try:
            stamp = json.loads(self.stamp.read_bytes())
            return {key: stamp[key] + "" for key in ("release", "stack")}  # a TypeError unless they are texts
        except (ValueError, TypeError, KeyError) as error:
            raise Refused(f"{self.stamp} is in the way: apply did not write it; move it away") from error

    @property
    def way_out(self) -> str:
        """What to do with a tree whose record is lost: a reinstall leaves the files that apply added."""
        package, name = self.root / self.framework.name, self.framework.name
        return f"save your edits, delete {package} and reinstall {name} or check it out again"

    def blobs(self) -> dict[str, str]:
        return package_blobs(self.root, self.framework)


def kept_name(path: str) -> str:
    """Return the name under which the original of ``path`` is kept; compileall ignores its ending."""
    return f"old+{path.replace('/', '+')}.kept"


def find_target(path: Path, *frameworks: Framework) -> Target:
    """Return the target at ``path``, which contains, or is, the package of exactly one of ``frameworks``.

    The files that apply added to a package that was uninstalled since count as the package.
    """
    places = [Target(path, each) for each in frameworks]
    places += [Target(path.parent, each) for each in frameworks if path.name == each.name]
    targets = [target for target in places if target.installed or target.record.is_file()]
    if len(targets) == 1:
        targets[0].read_stamp()
        return targets[0]
    if targets:
        names = [target.framework.name for target in targets]
        raise Refused(f"{path} contains {' and '.join(names)}; choose one: --framework {' or '.join(names)}")
    names = [framework.name for framework in frameworks]
    files = " or ".join(f"{name}/__init__.py" for name in names)
    missing = f"contains no {files}" if path.is_dir() else "is not a folder"
    kinds = f"a checkout of {' or '.join(names)}, an unpacked release or a site-packages folder"
    raise Refused(f"{path} {missing}; give {kinds}")


def installed_tree(framework: Framework) -> Path:
    """Return the folder that contains the package that this Python imports; raises Refused if it has none."""
    name = framework.name
    package = package_folder(name)
    if package is None:
        other = f"use a Python that has it, or give the folder that contains {name}/"
        raise Refused(f"{sys.executable} has no {name}; {other}")
    found = Path(os.path.abspath(package)).parent
    # verl is started by `python -m`, which looks into the current folder first.
    folders = {Path(path).resolve() for path in ["", *sys.path] if Path(path, name, "__init__.py").is_file()}
    if others := folders - {found.resolve()}:
        places = ", ".join(map(str, [found, *sorted(others)]))
        raise Refused(f"{sys.executable} may import {name} from {places}; give one of these folders")
    return found


@contextlib.contextmanager
def locked(path: Path, framework: Framework = VERL) -> Iterator[Target]:
    """Lock the target's package for this process; the kernel drops the lock when the process ends.

    While another process has the lock, a line on stderr reports the wait.
    """
    target = find_target(Path(os.path.abspath(path)), framework)
    folder = os.open(target.root / framework.name, os.O_RDONLY)
    above = os.open(target.root, FOLDER)
    try:
        if not try_lock(folder, fcntl.LOCK_EX):
            print(f"waiting for another command on {target.root}", file=sys.stderr, flush=True)
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield replace(target, tree=OpenTree(target.root, above, folder))
    finally:
        os.close(above)
        unlock(folder)


def opened(path: Path, framework: Framework = VERL) -> Target:
    """Return the target at ``path`` to read it; a line on stderr reports a command that changes it meanwhile."""
    target = find_target(Path(os.path.abspath(path)), framework)
    folder = os.open(target.root / framework.name, os.O_RDONLY)
    try:
        if not try_lock(folder, fcntl.LOCK_SH):
            print(f"another command is changing {target.root}: this may be an intermediate state", file=sys.stderr)
    finally:
        unlock(folder)
    return target


def try_lock(folder: int, kind: int) -> bool:
    """Lock an open folder without waiting; return False if another process has it locked.

    On a file system without locks, do nothing and return True.
    """
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def unlock(folder: int) -> None:
    """Unlock and close an open folder.

    Closing is not enough: a child that another thread has forked meanwhile shares the lock until it starts its program.
    """
    try_lock(folder, fcntl.LOCK_UN)
    os.close(folder)
