"""Apply a stack to a tree of its framework, and remove it again.

A patched tree has, in its package, the folder ``.precision`` with the originals of the files that were replaced and
``record.json`` with each file's blob id before and after:

1. apply stages everything in ``.precision`` and writes record.json: a full disk shows here, before any change;
2. it renames the staged files into place, and last of all the stamp;
3. unapply removes the stamp, renames the originals back, and removes record.json.

So a record without a stamp means that one of the two was cut short, and step 3 repairs it; and unapply is exact
whatever has become of the patches since, because it needs nothing but the record.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from lib.errors import Refused
from lib.files import write
from lib.patches.git import git
from lib.patches.git_objects import blob_id
from lib.patches.record import Record, make_record, read_record
from lib.patches.releases import VERL, Framework
from lib.patches.stack import Stack, load_stacks
from lib.patches.status import examine
from lib.patches.target import Target, locked
from lib.paths import REPO


def apply(path: Path, project: Path = REPO, framework: Framework = VERL) -> list[str]:
    """Apply the stack to the target and return what was done, a line each.

    Does nothing to a target that has this very stack; takes another version of the stack off first.

    Raises:
        Refused: the target is half-patched, dirty, foreign or read-only; nothing was changed.
        OSError: it cannot be written; the change was rolled back.
    """
    with locked(path, framework) as target:
        stacks = load_stacks(project, framework)
        blobs, record = target.blobs(), read_record(target)
        status = examine(target, blobs, record, stacks)
        if status.state == "patched":
            return [f"{status.detail}: nothing to do"]
        if status.state not in ("unpatched", "outdated", "interrupted"):
            raise Refused(f"{target.root}: {status.state}: {status.detail}")
        stack = next(stack for stack in stacks if stack.release.name == status.release)
        if not stack.patches:
            raise Refused(f"{stack.release} has no patches yet")
        kept = record.hooked(blobs) if record else []
        hooked = hooked_files(
            stack, lambda path: (target.original(path) if path in kept else target.root / path).read_bytes()
        )
        new = make_record(stack, record.undone(blobs) if record else blobs)
        refuse_unwritable(target, new)
        done = []
        if record:
            roll_back(target, record, blobs)
            done = [f"{framework.name} {record.release}: stack {record.stack} removed first"]
        put_on(target, new, {**hooked, **stack.added})
    counts = f"{len(new.replaced)} files hooked, {len(new.added)} copied, stamp {new.stack} in {framework.stamp}"
    return [*done, f"{stack.release}: {counts}"]


def unapply(path: Path, project: Path = REPO, framework: Framework = VERL) -> list[str]:
    """Take the stack off the target, to the byte, and return what was done, a line each.

    Does nothing to an unpatched target.

    Raises:
        Refused: files were edited since apply, the target is neither unpatched nor has the record that apply keeps, or
            it is read-only; nothing was changed.
    """
    with locked(path, framework) as target:
        blobs, record = target.blobs(), read_record(target)
        if record and not record.edited(blobs):
            roll_back(target, record, blobs)
            counts = f"{len(record.replaced)} files restored, {len(record.added)} deleted"
            return [f"{framework.name} {record.release}: stack {record.stack} removed, {counts}"]
        status = examine(target, blobs, record, load_stacks(project, framework))
        if status.state != "unpatched":
            raise Refused(f"{target.root}: {status.state}: {status.detail}")
        sweep(target)
        return [f"{status.detail} is not patched: nothing to do"]


def hooked_files(stack: Stack, pristine: Callable[[str], bytes]) -> dict[str, bytes]:
    """Return the patched content of each file that the patches change, made and verified in a scratch folder.

    Args:
        pristine: returns a file's content in the release, by path.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        for path, before in stack.before.items():
            content = pristine(path)
            if blob_id(content) != before:
                again = f"reinstall {stack.release.framework.name}"
                raise Refused(f"{path} is not the file that the patches of {stack.release} were made for; {again}")
            write(scratch / path, content)
        for patch in stack.patches:
            git("apply", "--whitespace=nowarn", "-", cwd=scratch, stdin=patch.text)
        hooked = {path: (scratch / path).read_bytes() for path in stack.after}
    if wrong := [path for path, content in hooked.items() if blob_id(content) != stack.after[path]]:
        raise Refused(f"{wrong[0]}: patched content does not match the blob id in the patches of {stack.release}")
    return hooked


def put_on(target: Target, record: Record, contents: Mapping[str, bytes]) -> None:
    """Make the changes of ``record`` to a pristine tree; roll back and raise what fails midway."""
    try:
        stage(target, record, contents)
        for folder in record.folders:
            (target.root / folder).mkdir(exist_ok=True)
        for path in contents:
            os.replace(target.staged(path), target.root / path)
            drop_compiled(target.root / path)
        os.replace(target.staged(target.framework.stamp), target.stamp)
    except BaseException:
        if target.record.exists():
            roll_back(target, record, target.blobs())
        else:
            sweep(target)
        raise


def stage(target: Target, record: Record, contents: Mapping[str, bytes]) -> None:
    """Write into the target's bookkeeping all that ``put_on`` will rename or restore, the record last."""
    sweep(target)
    target.bookkeeping.mkdir()
    (target.bookkeeping / ".gitignore").write_text("*\n")  # if the target is a git checkout
    for path, content in {**contents, target.framework.stamp: record.stamp_file}.items():
        target.staged(path).write_bytes(content)
    for path in record.replaced:
        shutil.copy2(target.root / path, target.original(path))
        shutil.copymode(target.root / path, target.staged(path))
    begun = target.staged("record.json")
    begun.write_text(json.dumps(asdict(record)))
    os.replace(begun, target.record)


def roll_back(target: Target, record: Record, blobs: Mapping[str, str]) -> None:
    """Undo the changes of ``record`` in the tree of these ``blobs``; if it is cut short it can be called again."""
    hooked = record.hooked(blobs)
    for path in hooked:
        if blob_id(target.original(path).read_bytes()) != record.replaced[path][0]:
            again = f"reinstall {target.framework.name} {record.release}"
            raise Refused(f"{target.original(path)} was changed since apply; {again}")
    refuse_unwritable(target, record)
    target.stamp.unlink(missing_ok=True)
    for path in hooked:
        os.replace(target.original(path), target.root / path)
    for path in record.added:
        (target.root / path).unlink(missing_ok=True)
    for path in [*record.replaced, *record.added]:
        drop_compiled(target.root / path)
    for folder in map(target.root.joinpath, reversed(record.folders)):
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
    target.record.unlink()
    sweep(target)


def sweep(target: Target) -> None:
    """Remove a stamp and bookkeeping that belong to no record."""
    target.stamp.unlink(missing_ok=True)
    if target.bookkeeping.exists():
        shutil.rmtree(target.bookkeeping)


def drop_compiled(path: Path) -> None:
    """Remove the bytecode of ``path``: Python would use it for a new file of the same time and size."""
    cache = path.parent / "__pycache__"
    for compiled in cache.glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    if cache.exists() and not any(cache.iterdir()):
        cache.rmdir()


def refuse_unwritable(target: Target, record: Record) -> None:
    """Raise Refused if a folder that would change is read-only."""
    paths = [target.framework.bookkeeping, target.framework.stamp, *record.replaced, *record.added]
    for folder in sorted({(target.root / path).parent for path in paths}):
        if folder.exists() and not os.access(folder, os.W_OK):
            raise Refused(f"{folder} is read-only; nothing was changed")
