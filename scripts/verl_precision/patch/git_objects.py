"""Compute git's ids of the files and of the tree of a package, without git."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl_precision.patch.releases import VERL, Framework


def blob_id(content: bytes) -> str:
    """Return the id that git gives a file of this content."""
    return object_id("blob", content)


def object_id(kind: str, content: bytes) -> str:
    return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(content)) + content, usedforsecurity=False).hexdigest()


def tree_id(blobs: Mapping[str, str]) -> str:
    """Return the id that git gives a tree of plain files, from their blob ids by path relative to that tree."""
    entries: dict[str, str] = {}
    folders: dict[str, dict[str, str]] = {}
    for path, blob in blobs.items():
        head, _, rest = path.partition("/")
        if rest:
            folders.setdefault(head, {})[rest] = blob
        else:
            entries[head] = "100644 " + blob
    entries |= {name: "40000 " + tree_id(inside) for name, inside in folders.items()}
    content = b""
    # git sorts a folder as if its name ended in a slash
    for name in sorted(entries, key=lambda name: name + "/" if name in folders else name):
        mode, _, blob = entries[name].partition(" ")
        content += os.fsencode(f"{mode} {name}\0") + bytes.fromhex(blob)
    return object_id("tree", content)


def package_tree_id(blobs: Mapping[str, str]) -> str:
    """Return the tree id of a package from blob ids by path, each path starting with the package's name."""
    return tree_id({path.partition("/")[2]: blob for path, blob in blobs.items()})


def package_files(root: Path, framework: Framework = VERL) -> Iterator[str]:
    """Yield the path of each file of the package below ``root``, without compiled files and what apply keeps there.

    A dangling link, a pipe and the like are no files; a link to a file is one.

    Raises:
        OSError: a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(root / framework.name, onerror=fail):
        here = Path(folder).relative_to(root).as_posix()
        skipped = (f"{here}/__pycache__", framework.bookkeeping, framework.staging)
        subfolders[:] = [name for name in subfolders if f"{here}/{name}" not in skipped]
        for name in names:
            path = f"{here}/{name}"
            if path != framework.stamp and not name.endswith(".pyc") and os.path.isfile(root / path):
                yield path


def package_blobs(root: Path, framework: Framework = VERL) -> dict[str, str]:
    """Return the blob id of each file of the package below ``root``, by path."""
    return {path: blob_id((root / path).read_bytes()) for path in package_files(root, framework)}
