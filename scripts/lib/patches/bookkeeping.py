"""Write, flush and clear what apply keeps in a patched tree: the originals, the record, and files not yet in place.

What is written has the mode and, where root writes, the owner of the tree's own files.
"""

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path

from lib.errors import Refused
from lib.patches.record import Record
from lib.patches.target import Target, kept_name

OWN_NAMES = re.compile(r"(new|old)\+.*|CHANGELOG\.md|record\.json|\.gitignore")
NO_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # as of network file systems
LAST = ("record.json", ".gitignore")  # removed last, in this order: the folder is known by them
IGNORE = b"# verl-precision keeps here what unapply restores.\n*\n"  # of .gitignore, by which the folder is known


def stage(
    target: Target,
    record: Record,
    contents: Mapping[str, bytes],
    kept: Collection[str] = (),
    restored: Mapping[str, bytes] | None = None,
    changelog: str = "",
) -> None:
    """Write all that ``record`` needs into the target's staging folder, and have it on the disk; changes nothing else.

    Args:
        contents: the new files by path.
        kept: files whose originals the target keeps already; the others have theirs in place.
        restored: originals that are neither kept nor in place, by path.

    Raises:
        Refused: something that apply did not write is where it keeps its folders.
        OSError: it cannot be written.
    """
    for folder in (target.bookkeeping, target.staging):
        if strange := strangers(folder):
            raise Refused(f"{strange[0]} is in the way: apply did not write it; move it away")
    clear(target.staging)
    package = target.root / target.framework.name
    try:
        make_folder(target.staging)
        files = {".gitignore": IGNORE, "CHANGELOG.md": changelog.encode()}
        files |= {target.staged(path).name: content for path, content in contents.items()}
        files |= {target.staged(target.framework.stamp).name: record.stamp_file}
        for name, content in {**files, "record.json": json.dumps(asdict(record)).encode()}.items():
            (target.staging / name).write_bytes(content)
            follow(target.staging / name, package / "__init__.py")
        for path in record.replaced:
            original, place = target.staging / kept_name(path), target.root / path
            if path in contents:
                follow(target.staging / target.staged(path).name, place)
            if path in (restored or {}):
                original.write_bytes(restored[path])
                follow(original, place)
            else:
                copy(target.original(path) if path in kept else place, original)
        flush(target.staging)
    except BaseException:
        clear(target.staging)
        raise


def commit_staged(target: Target) -> None:
    """Make the staging folder the target's bookkeeping."""
    clear(target.bookkeeping)
    os.replace(target.staging, target.bookkeeping)


def copy(source: Path, to: Path) -> None:
    """Copy a file with its mode, times and, as root, owner; a link as it is."""
    shutil.copy2(source, to, follow_symlinks=False)
    if not to.is_symlink():
        follow(to, source)


def follow(path: Path, model: Path) -> None:
    """Give ``path`` the mode of ``model``, and its owner if this is root."""
    status = model.stat()
    if os.geteuid() == 0:
        os.chown(path, status.st_uid, status.st_gid)
    path.chmod(stat.S_IMODE(status.st_mode))


def make_folder(path: Path) -> None:
    """Create a folder, and those above it, with the mode and owner of the one that it is in."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir()
        follow(path, path.parent)


def flush(folder: Path) -> None:
    """Have the folder and its files on the disk before anything relies on them."""
    for path in (*folder.iterdir(), folder):
        if not path.is_symlink():
            opened = os.open(path, os.O_RDONLY)
            try:
                os.fsync(opened)
            except OSError as fault:
                if fault.errno not in NO_FLUSH:
                    raise OSError(fault.errno, fault.strerror, str(path)) from fault
            finally:
                os.close(opened)


def strangers(folder: Path) -> list[Path]:
    """Return what apply did not write in its folder, or the folder itself if it is none, or not apply's."""
    if folder.is_symlink() or not folder.is_dir():
        return [folder] if os.path.lexists(folder) else []
    ignore = folder / ".gitignore"
    # Without its first line in older trees, which are known by their record.
    # On a full disk the file is cut short.
    own = (folder / "record.json").is_file() or ignore.is_file() and IGNORE.startswith(ignore.read_bytes())
    return [path for path in folder.iterdir() if not (own and OWN_NAMES.fullmatch(path.name))]


def clear(folder: Path) -> None:
    """Remove what apply wrote into its folder, and the folder unless it contains something else."""
    if folder.is_dir() and not folder.is_symlink():
        strange = strangers(folder)
        own = [path for path in folder.iterdir() if path not in strange]
        for path in sorted(own, key=lambda path: (path.name in LAST, path.name == LAST[1])):
            path.unlink()
        if not strange:
            folder.rmdir()


def sweep(target: Target) -> None:
    """Remove a stamp and bookkeeping that belong to no record."""
    if target.stamp.is_file():
        target.stamp.unlink()
    clear(target.bookkeeping)
    clear(target.staging)
