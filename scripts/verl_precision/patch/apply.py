"""Apply a stack to a tree of its framework, and remove it again.

A patched tree has, in its package, the folder ``.precision`` with the originals of the files that were replaced and
``record.json`` with each file's blob id before and after:

1. apply writes these, and the new files, into ``.precision.new``: a full disk shows here, before any change;
2. it removes an older stack, renames that folder to ``.precision``, the files into place, and last of all the stamp;
3. unapply removes the stamp, renames the originals back, and removes record.json.

A record without a stamp means that apply or unapply was cut short; step 3 repairs it. Unapply needs only the record, so
it is exact even if the project's patches have changed since.
"""

import os
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from verl_precision.errors import Refused, adding
from verl_precision.files import write
from verl_precision.format import first_three
from verl_precision.patch.git import git
from verl_precision.patch.git_objects import blob_id
from verl_precision.patch.record import Record, clear, clear_leftovers, commit_staged, make_record, read_record, stage
from verl_precision.patch.releases import VERL, Framework
from verl_precision.patch.stack import Stack, load_stacks
from verl_precision.patch.status import examine
from verl_precision.patch.target import Target, locked
from verl_precision.paths import REPO

UNCHANGED = "nothing was changed"


def apply(path: Path, project: Path = REPO, framework: Framework = VERL, fixes: bool = True) -> list[str]:
    """Apply a stack to the target and return what was done, a line each.

    Does nothing to a target that has this very stack. Replaces another version of it, or the release's other stack.

    Args:
        fixes: apply the series ``fixes``, too, where the release has one.

    Raises:
        Refused: the target is half-patched, dirty, foreign or read-only; nothing was changed.
        OSError: it cannot be written; nothing was changed, or the change was rolled back to the release.
    """
    with locked(path, framework) as target:
        stacks = load_stacks(project, framework)
        blobs = target.blobs()
        record = read_record(target, blobs)
        status = examine(target, blobs, record, stacks)
        if status.state not in ("unpatched", "patched", "outdated", "interrupted"):
            raise Refused(f"{target.root}: {status.state}: {status.detail}")
        own = [stack for stack in stacks if stack.release.name == status.release]
        stack = own[-1 if fixes else 0]
        if status.state == "patched" and status.stack == stack.id:
            return [f"{status.detail}: nothing to do"]
        if not stack.patches:
            raise Refused(f"{stack.release} has no patches yet")
        undone = record.undone(blobs) if record else blobs
        if edited := stack.mismatches(undone):  # by the release's other series, which the tree may have
            ways = "save your edits and restore the release's files" + ", or apply without FIXES=yes" * stack.fixes
            raise Refused(f"{target.root}: {stack.title} changes or adds {first_three(edited)}, edited here: {ways}")
        kept = record.hooked(blobs) if record else []
        if record:
            refuse_unwritable(target, record)
            refuse_damaged(target, record, blobs)
        pristine = {
            path: (target.original_file(path) if path in kept else target.root / path).read_bytes()
            for path in stack.before
        }
        hooked = run_patches(stack, pristine)
        new = make_record(stack, undone)
        refuse_unwritable(target, new)
        done = []
        if record:
            left = "removed first" if kept else "left files, which were deleted"
            done = [f"{framework.name} {record.release}: stack {record.stack} {left}"]
            if status.series.endswith("fixes") and not stack.fixes:
                done += ['the series "fixes" was removed; FIXES=yes puts it back']
        if status.state == "outdated":
            done += ["CHANGELOG.md lists the changes"]
        change_files(target, new, {**hooked, **stack.added}, kept, record)
    counts = f"{len(new.replaced)} files patched, {len(new.added)} added, {stack.title}"
    return [*done, f"{stack.release}: {counts}", *(f"  {patch.subject}" for patch in stack.patches if patch.fixes)]


def unapply(path: Path, project: Path = REPO, framework: Framework = VERL, force: bool = False) -> list[str]:
    """Remove the stack from the target, restore every file byte for byte, and return what was done, a line each.

    Does nothing to an unpatched target.

    Args:
        force: rename files that were edited since apply to ``<name>.edited``, instead of refusing.

    Raises:
        Refused: files were edited since apply, or the target is neither unpatched nor has the record that apply keeps,
            or it is read-only; nothing was changed.
    """
    with locked(path, framework) as target:
        blobs = target.blobs()
        record = read_record(target, blobs)
        edited = record.edited(blobs) if record else []
        if record and (force or not edited):
            restored = {path: record.replaced[path][1] for path in edited if path in record.replaced}
            refuse_unwritable(target, record)
            refuse_damaged(target, record, blobs | restored)
            aside = set_aside(target, edited)
            with adding("not all files are restored; remove the cause, then repeat the command"):
                roll_back(target, record, blobs | restored)
            clear_leftovers(target)
            back = len(record.hooked(blobs | restored)) + len(record.removed(blobs))
            counts = f"{back} files restored, {len(record.added.items() & blobs.items())} deleted"
            return [f"{framework.name} {record.release}: stack {record.stack} removed, {counts}", *aside]
        status = examine(target, blobs, record, load_stacks(project, framework))
        if status.state != "unpatched":
            raise Refused(f"{target.root}: {status.state}: {status.detail}")
        clear_leftovers(target)
        return [f"{status.detail} is not patched: nothing to do"]


def run_patches(stack: Stack, contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the hooked files, of these contents by path, with the stack's patches; verifies them before and after."""
    with tempfile.TemporaryDirectory() as folder, adding(UNCHANGED, Path(folder)):
        scratch = Path(folder).resolve()
        for path, content in contents.items():
            if blob_id(content) != stack.before[path]:
                again = f"reinstall {stack.release.framework.name}"
                raise Refused(f"{path} is not the file that the patches of {stack.release} were made for; {again}")
            write(scratch / path, content)
        git("apply", "--whitespace=nowarn", "-", cwd=scratch, stdin="".join(patch.text for patch in stack.patches))
        made = {path: (scratch / path).read_bytes() for path in contents}
    if wrong := [path for path, content in made.items() if blob_id(content) != stack.after[path]]:
        raise Refused(f"{wrong[0]}: patched content does not match the blob id in the patches of {stack.release}")
    return made


def change_files(
    target: Target, record: Record, contents: Mapping[str, bytes], kept: Collection[str], older: Record | None
) -> None:
    """Make the changes of ``record`` to a pristine tree, or to one with ``older`` applied.

    An error midway, such as a file that was edited meanwhile and keeps the edit, rolls back to the pristine tree.
    """
    rolled_back = f"rolled back to the unpatched {target.framework.name} {record.release}"
    with adding(UNCHANGED):
        stage(target, record, contents, kept)
    try:
        with adding(rolled_back):
            if older:
                roll_back(target, older, target.blobs())
            commit_staged(target)
            for folder in record.folders:
                target.tree.make_folder(target.root / folder)
            for path in contents:
                if path in record.replaced and blob_id((target.root / path).read_bytes()) != record.replaced[path][0]:
                    raise Refused(f"{target.root / path} changed while apply ran; {rolled_back}")
                target.tree.replace(target.root / path, by=target.staged(path))
                drop_compiled(target, path)
            target.tree.replace(target.stamp, by=target.staged(target.framework.stamp))
    except BaseException:
        blobs = target.blobs()
        if begun := read_record(target, blobs):
            roll_back(target, begun, blobs)
        clear_leftovers(target)
        raise


def roll_back(target: Target, record: Record, blobs: Mapping[str, str]) -> None:
    """Undo the changes of ``record`` in the tree of these ``blobs``; can be repeated if it is cut short."""
    if os.path.lexists(target.stamp):
        target.tree.remove(target.stamp)
    for path in [*record.removed(blobs), *record.hooked(blobs)]:
        target.tree.make_folder((target.root / path).parent)
        target.tree.replace(target.root / path, by=target.original(path))
    for path in [path for path, blob in record.added.items() if blobs.get(path) == blob]:
        target.tree.remove(target.root / path)
    for path in [*record.replaced, *record.added]:
        drop_compiled(target, path)
    folders = {target.root / folder for path in record.added for folder in Path(path).parents[:-1]}
    if not target.installed:  # pip leaves folders
        folders |= {path for path in (target.root / target.framework.name).rglob("*") if path.is_dir()}
    remove_empty(target, sorted(folders, reverse=True))
    clear(target, target.bookkeeping)
    remove_empty(target, [target.root / target.framework.name])


def remove_empty(target: Target, folders: Iterable[Path]) -> None:
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            target.tree.remove_folder(folder)


def set_aside(target: Target, paths: Collection[str]) -> list[str]:
    """Rename files to ``<name>.edited``, all or none, and return a line for each."""
    names = {target.root / path: target.root / f"{path}.edited" for path in paths}
    if taken := [name for name in names.values() if os.path.lexists(name)]:
        raise Refused(f"{taken[0]} is in the way: unapply renames the edited file to it; move it away")
    for path, name in names.items():
        target.tree.replace(name, by=path)
    return [f"edited file kept as {name}" for name in names.values()]


def drop_compiled(target: Target, path: str) -> None:
    """Remove the bytecode of ``path``: Python would use it for a new file of the same modification time and size."""
    for compiled in bytecode(target.root / path):
        target.tree.remove(compiled)
        remove_empty(target, [compiled.parent])


def bytecode(path: Path) -> list[Path]:
    return list((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))


def refuse_unwritable(target: Target, record: Record) -> None:
    """Raise Refused if a folder to change is read-only or a link, or a path to change is not a file or not writable."""
    package = target.root / target.framework.name
    paths = [target.framework.bookkeeping, target.framework.stamp, *record.replaced, *record.added]
    above = {folder for path in paths for folder in (target.root / path).parents if folder.is_relative_to(package)}
    if links := sorted(folder for folder in above - {package} if folder.is_symlink()):
        raise Refused(f"{links[0]} is in the way: it is a link, not a folder; move it away; nothing was changed")
    folders = {(target.root / path).parent for path in paths}
    folders |= {compiled.parent for path in paths for compiled in bytecode(target.root / path)}
    for folder in sorted(folders):
        if folder.exists() and not os.access(folder, os.W_OK):
            raise Refused(f"{folder} is read-only; nothing was changed")
    for path in paths[1:]:
        if os.geteuid() == 0 and (target.root / path).is_file() and not os.access(target.root / path, os.W_OK):
            cause = "cannot be changed, not even by root: see lsattr; nothing was changed"
            raise Refused(f"{target.root / path} {cause}")
    kinds = [(target.root / path, "file", Path.is_file) for path in paths[1:]]
    kinds += [(target.root / folder, "folder", Path.is_dir) for folder in record.folders]
    for path, kind, fits in kinds:
        if os.path.lexists(path) and not fits(path):
            raise Refused(f"{path} is in the way: it is no {kind}; move it away; nothing was changed")


def refuse_damaged(target: Target, record: Record, blobs: Mapping[str, str]) -> None:
    """Raise Refused if an original that would be restored is not the one that apply kept."""
    for path in [*record.removed(blobs), *record.hooked(blobs)]:
        original = target.original_file(path)
        if not original.is_file() or blob_id(original.read_bytes()) != record.replaced[path][0]:
            again = f"save your edits, then reinstall {target.framework.name} {record.release}"
            raise Refused(f"{original} was changed since apply; {again}")
