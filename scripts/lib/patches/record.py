"""Make and read the record that apply keeps in a patched tree, from which unapply restores it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lib.patches.git_objects import blob_id, package_tree_id
from lib.patches.stack import Stack
from lib.patches.target import Target


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
        """Return the files of the record that unapply cannot account for; a reinstalled package is not an edit."""
        known = {path: (blob, None) for path, blob in self.added.items()} | (
            self.replaced if self.hooked(blobs) else {}
        )
        return [path for path, ids in known.items() if blobs.get(path) not in ids]

    def undone(self, blobs: Mapping[str, str]) -> dict[str, str]:
        """Return the blobs as unapply would leave them."""
        undone = {path: blob for path, blob in blobs.items() if self.added.get(path) != blob}
        return undone | {path: self.replaced[path][0] for path in self.hooked(blobs)}


def make_record(stack: Stack, pristine: Mapping[str, str]) -> Record:
    """Return the record of applying ``stack`` to a tree of these blobs."""
    added = {path: blob_id(content) for path, content in stack.added.items()}
    folders = {folder.as_posix() for path in added for folder in Path(path).parents}
    folders -= {folder.as_posix() for path in pristine for folder in Path(path).parents}
    replaced = {path: (before, stack.after[path]) for path, before in stack.before.items()}
    tree = package_tree_id({**pristine, **stack.after, **added})
    return Record(stack.release.name, stack.id, tree, replaced, added, sorted(folders))


def read_record(target: Target) -> Record | None:
    """Return the target's record; None if no apply has begun."""
    return Record(**json.loads(target.record.read_text())) if target.record.exists() else None
