"""Write, flush and clear what apply keeps in a patched tree: the originals, the record, and files not yet in place.

What is written has the mode and, where root writes, the owner of the tree's own files.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.patch.record import Record
from verl_precision.patch.target import Target, kept_name

OWN_NAMES = re.compile(r"(new|old)\+.*|record\.json|\.gitignore")
LAST = ("record.json", ".gitignore")  # removed last, in this order: the folder is recognized by them
IGNORE = b"# verl-precision keeps here what unapply restores.\n*\n"  # of .gitignore, which identifies the folder


def stage(
    target: Target,
    record: Record,
    contents: Mapping[str, bytes],
    kept: Collection[str] = (),
) -> None:
    """Write all that ``record`` needs into the target's staging folder and flush it to the disk; change nothing else.

    Args:
        contents: the new files by path.
        kept: files whose originals the target keeps already; the others have theirs in place.

    Raises:
        Refused: something that apply did not write is where it keeps its folders.
        OSError: it cannot be written.
    """
    for folder in (target.bookkeeping, target.staging):
        if foreign := foreign_files(folder):
            raise Refused(f"{foreign[0]} is in the way: apply did not write it; move it away")
    clear(target, target.staging)
    files = {".gitignore": IGNORE}
    files |= {target.staged(path).name: content for path, content in contents.items()}
    files |= {target.staged(target.framework.stamp).name: record.stamp_file}
    files |= {"record.json": json.dumps(asdict(record)).encode()}
    places = {target.staged(path).name: target.root / path for path in contents if path in record.replaced}
    try:
        target.tree.make_folder(target.staging)
        for name, content in files.items():
            model = places.get(name, target.root / target.framework.name / "__init__.py")
            target.tree.write(target.staging / name, content, model)
        for path in record.replaced:
            source = target.original(path) if path in kept else target.root / path
            target.tree.copy(source, target.staging / kept_name(path))
        target.tree.flush(target.staging)
    except BaseException:
        clear(target, target.staging)
        raise


def commit_staged(target: Target) -> None:
    """Make the staging folder the target's bookkeeping."""
    clear(target, target.bookkeeping)
    target.tree.replace(target.bookkeeping, target.staging)


def foreign_files(folder: Path) -> list[Path]:
    """Return the files in apply's folder that apply did not write; the path itself if it is no folder."""
    if folder.is_symlink() or not folder.is_dir():
        return [folder] if os.path.lexists(folder) else []
    ignore = folder / ".gitignore"
    own = ignore.is_file() and IGNORE.startswith(ignore.read_bytes())  # a full disk cuts the file short
    return [path for path in folder.iterdir() if not (own and OWN_NAMES.fullmatch(path.name))]


def clear(target: Target, folder: Path) -> None:
    """Remove what apply wrote into its folder, and the folder unless it contains something else."""
    if folder.is_dir() and not folder.is_symlink():
        foreign = foreign_files(folder)
        own = [path for path in folder.iterdir() if path not in foreign]
        for path in sorted(own, key=lambda path: (path.name in LAST, path.name == LAST[1])):
            target.tree.remove(path)
        if not foreign:
            target.tree.remove_folder(folder)


def clear_leftovers(target: Target) -> None:
    """Remove a stamp and bookkeeping that belong to no record."""
    if target.stamp.is_file():
        target.tree.remove(target.stamp)
    clear(target, target.bookkeeping)
    clear(target, target.staging)
