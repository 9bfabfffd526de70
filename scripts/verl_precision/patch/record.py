"""Make and read the record that apply keeps in a patched tree, from which unapply restores it."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_origin

from verl_precision.errors import Refused
from verl_precision.patch.git_objects import package_tree_id
from verl_precision.patch.releases import Framework
from verl_precision.patch.stack import Stack
from verl_precision.patch.target import Target

OBJECT_ID = re.compile("[0-9a-f]{40}")


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
        """Return the replaced files that are missing."""
        return [path for path in self.replaced if path not in blobs]

    def undone(self, blobs: Mapping[str, str]) -> dict[str, str]:
        """Return the blobs as unapply would leave them."""
        undone = {path: blob for path, blob in blobs.items() if self.added.get(path) != blob}
        return undone | {path: self.replaced[path][0] for path in (*self.hooked(blobs), *self.removed(blobs))}


def make_record(stack: Stack, blobs: Mapping[str, str]) -> Record:
    """Return the record of applying ``stack`` to a tree of these blobs, or of having applied it to them."""
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
        framework = target.framework.name
        remedy = f"save your edits, delete {target.root / framework} and reinstall {framework} or check it out again"
        raise Refused(f"{target.record} {cause}; {remedy}") from error
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
