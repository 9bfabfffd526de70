"""Read, write and clear what apply keeps in a patched tree: its record, the originals, and files not yet in place.

What is written has the mode and, where root writes, the owner of the tree's own files.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import get_origin

from verl_precision.errors import Refused
from verl_precision.patch.git_objects import package_tree_id
from verl_precision.patch.releases import Framework
from verl_precision.patch.stack import Stack
from verl_precision.patch.target import Target, kept_name

OBJECT_ID = re.compile("[0-9a-f]{40}")
OWN_NAMES = re.compile(r"(new|old)\+.*|record\.json|\.gitignore")
LAST = ("record.json", ".gitignore")  # removed last, in this order: the folder is recognized by them
IGNORE = b"# verl-precision keeps here what unapply restores.\n*\n"  # of .gitignore, which identifies the folder


@dataclass(frozen=True)
class Record:
    """Record of an apply: blob ids before and after of the files replaced, blob ids of those added, folders created."""

    release: str
    stack: str
    tree: str
    replaced: dict[str, tuple[str, str]]
    added: dict[str, str]
    folders: list[str]

    @property
    def stamp(self) -> dict[str, str]:
        return {"release": self.release, "stack": self.stack, "tree": self.tree}

    @property
    def stamp_file(self) -> bytes:
        return json.dumps(self.stamp).encode() + b"\n"

    def hooked(self, blobs: Mapping[str, str]) -> list[str]:
        """Return the replaced files that have the patched content."""
        return [path for path, (_, after) in self.replaced.items() if blobs.get(path) == after]

    def edited(self, blobs: Mapping[str, str]) -> list[str]:
        """Return the files of the record that have neither the original nor the patched content."""
        known = {path: (blob,) for path, blob in self.added.items()} | self.replaced
        return [path for path, ids in known.items() if path in blobs and blobs[path] not in ids]

    def removed(self, blobs: Mapping[str, str]) -> list[str]:
        return [path for path in self.replaced if path not in blobs]

    def undone(self, blobs: Mapping[str, str]) -> dict[str, str]:
        """Return the blobs as unapply would leave them."""
        undone = {path: blob for path, blob in blobs.items() if self.added.get(path) != blob}
        return undone | {path: self.replaced[path][0] for path in (*self.hooked(blobs), *self.removed(blobs))}


def make_record(stack: Stack, blobs: Mapping[str, str]) -> Record:
    """Return the record of applying ``stack`` to a tree of these blobs."""
    folders = {folder.as_posix() for path in stack.added for folder in Path(path).parents}
    folders -= {folder.as_posix() for path in blobs if path not in stack.added for folder in Path(path).parents}
    replaced = {path: (before, stack.after[path]) for path, before in stack.before.items()}
    tree = package_tree_id({**blobs, **stack.after, **stack.copied})
    return Record(stack.release.name, stack.id, tree, replaced, stack.copied, sorted(folders))


def read_record(target: Target, blobs: Mapping[str, str]) -> Record | None:
    """Return the target's record; None if no apply has begun.

    If the package was uninstalled since, or another version installed, it has only the files added. After
    an interrupted unapply it leaves out the files that were restored and then edited or removed.
    """
    if not target.record.exists():
        return None
    try:
        record = Record(**json.loads(target.record.read_bytes()))
        for field in fields(record):
            if not isinstance(getattr(record, field.name), get_origin(field.type) or field.type):
                raise TypeError(f"{field.name} has another type")
        check_paths([*record.replaced, *record.added, *record.folders], target.framework)
        replaced = [each for before, after in record.replaced.values() for each in (before, after)]
        for each in (record.tree, *record.added.values(), *replaced):
            if not OBJECT_ID.fullmatch(each):
                raise ValueError(f"{each!r} is not an object id")
    except (ValueError, TypeError, RecursionError) as error:
        cause = f"is damaged, or of a newer version of this project ({error})"
        raise Refused(f"{target.record} {cause}; {target.way_out}") from error
    if not record.hooked(blobs) and target.version != record.release:
        return replace(record, replaced={})
    if target.stamp.exists():
        return record
    kept = {path for path in record.replaced if os.path.lexists(target.original(path))}
    ours = {path: ids for path, ids in record.replaced.items() if path in kept or blobs.get(path) in ids}
    return replace(record, replaced=ours)


def check_paths(paths: Iterable[str], framework: Framework) -> None:
    """Raise ValueError if one is not a path into the framework's package, or is one into what apply keeps there.

    A record may come with a repository that was cloned, and unapply replaces and deletes the files that it names.
    """
    kept = (framework.bookkeeping, framework.staging)
    for path in paths:
        package, *rest = str(path).split("/")
        normal = rest and not {"", ".", ".."} & {*rest} and "\0" not in path
        if package != framework.name or not normal or f"{package}/{rest[0]}" in kept:
            raise ValueError(f"{path!r} is not inside {framework.name}/")


def likely(record: Record | None, stacks: Sequence[Stack]) -> Stack:
    """Return the stack of the record; without a record, the first one.

    If this project no longer has that stack, return the one that shares most of its files.
    """
    if record is None:
        return stacks[0]
    own = {*record.replaced, *record.added}
    # Without hooked files, as after another release was installed, only the added ones are compared.
    files = {stack.id: {*stack.added, *(stack.before if record.replaced else ())} for stack in stacks}
    return max(stacks, key=lambda stack: (stack.id == record.stack, -len(own ^ files[stack.id])))


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
