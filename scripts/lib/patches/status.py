"""Determine the state of a target: its release, whether it is patched, and the files that differ."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lib.format import first_three
from lib.patches.git_objects import blob_id
from lib.patches.record import Record, read_record
from lib.patches.releases import VERL, Framework
from lib.patches.stack import Stack, closest, load_stacks
from lib.patches.target import Target, locked
from lib.paths import REPO


@dataclass(frozen=True)
class Status:
    """The state of a target.

    Args:
        state: unpatched, patched, outdated (patched by another version of the stack), interrupted (the next apply or
            unapply repairs it), half-patched, dirty, foreign or ported (no release, with the stack as make port makes).
        detail: one line on what the state means here and what to do.
        release: the one that the tree is, or was before it was edited; None if it matches none.
        exact: whether the files that the stack does not touch are the wheel's.
        stack: id of the release's stack in this project.
        stamp: the target's own.
    """

    state: str
    detail: str
    release: str | None = None
    exact: bool = False
    stack: str | None = None
    stamp: dict[str, str] | None = None

    def __str__(self) -> str:
        others = "; files that the patches do not touch differ from the wheel's"
        return f"{self.state}: {self.detail}" + (others if self.stack and not self.exact else "")


def status(path: Path, project: Path = REPO, framework: Framework = VERL) -> Status:
    """Return a target's state; changes nothing."""
    with locked(path, framework) as target:
        return examine(target, target.blobs(), read_record(target), load_stacks(project, framework))


def examine(target: Target, blobs: Mapping[str, str], record: Record | None, stacks: list[Stack]) -> Status:
    """Return the target's state, from its blobs, its record and the stacks of its framework."""
    stamped = record and target.stamp.exists() and target.stamp.read_bytes() == record.stamp_file
    stamp = record.stamp if stamped else None
    if record and (edited := record.edited(blobs)):
        copied = [path for path in edited if path in record.added]
        delete = f", and delete {first_three(copied)}, which apply added" if copied else ""
        remedy = f"save the edits, then put the files back or reinstall {target.framework.name}{delete}"
        detail = f"edited after apply: {first_three(edited)}; {remedy}"
        return Status("dirty", detail, record.release, stamp=stamp)
    pristine = record.undone(blobs) if record else blobs
    matching = [stack for stack in stacks if not stack.mismatches(pristine)]
    if not matching:
        state, detail = unmatched(target, pristine, record, stacks)
        return Status(state, detail, stamp=stamp)
    stack = max(matching, key=lambda stack: stack.rest_is_pristine(pristine))
    exact = stack.rest_is_pristine(pristine)
    state, detail = matched(target, stack, blobs, record, bool(stamp))
    return Status(state, detail, stack.release.name, exact, stack.id, stamp)


def matched(
    target: Target, stack: Stack, blobs: Mapping[str, str], record: Record | None, stamped: bool
) -> tuple[str, str]:
    """Return state and detail of a tree that is the stack's release once the record is undone."""
    name = str(stack.release)
    if not record:
        return "unpatched", name
    hooked = record.hooked(blobs)
    bare = [path for path in record.replaced if path not in hooked] + [p for p in record.added if p not in blobs]
    if stamped and not bare:
        if (record.release, record.stack) == (stack.release.name, stack.id):
            return "patched", f"{name} with stack {stack.id}"
        return "outdated", f"{name} with stack {record.stack}; apply brings it to {stack.id}"
    if stamped and hooked:
        lost = f"{name} with stack {record.stack}, but {bare[0]} is not patched"
        return "half-patched", f"{lost}; make unapply-patches {target.variable} restores the release, then apply again"
    cause = f"apply or unapply was interrupted, or {stack.release.framework.name} was reinstalled over the stack"
    return "interrupted", f"{name}: {cause}; the next apply or unapply repairs it"


def unmatched(
    target: Target, pristine: Mapping[str, str], record: Record | None, stacks: list[Stack]
) -> tuple[str, str]:
    """Return state and detail of a tree that is no release: the closest one and the files that differ from it."""
    framework = target.framework.name
    by_name = {stack.release.name: stack for stack in stacks}
    if record and record.release not in by_name:
        origin = f"another version of this project, for {framework} {record.release}, stack {record.stack}"
        return "foreign", f"patched by {origin}; make unapply-patches {target.variable} removes that"
    stamp = None if record or not target.stamp.exists() else json.loads(target.stamp.read_bytes())
    recorded = record.release if record else stamp and stamp["release"]
    stack = by_name[recorded] if recorded in by_name else closest(pristine, stacks)
    name, differing = str(stack.release), stack.mismatches(pristine)
    patched = {**stack.after, **{path: blob_id(content) for path, content in stack.added.items()}}
    unknown = [path for path in differing if pristine.get(path) != patched.get(path, "")]
    reset = f"reinstall {name} or check its files out again"
    origin = f"{framework} {recorded}" if recorded else name
    # A reinstall leaves the files that apply added.
    anew = f"delete {target.root / framework}, then reinstall {origin} or check its files out again"
    if not unknown:
        return "half-patched", f"{name}, but {differing[0]} is patched and apply left no record; {anew}"
    if stamp:
        lost = f"but without the record in {target.framework.bookkeeping} that unapply needs"
        return "half-patched", f"{origin} with stack {stamp['stack']}, {lost}; {anew}"
    if record:
        return "dirty", f"{name}, but for {first_three(unknown)}; save your edits, then {reset}"
    # With all files that apply copies in, it was patched as a port, whose hooks need not be a release's.
    if stack.added.keys() <= pristine.keys():
        other = [path for path, content in stack.added.items() if pristine[path] != blob_id(content)]
        of = (
            f"another version's copied files: {first_three(other)}"
            if other
            else f"the copied files of stack {stack.id}"
        )
        removal = "its patches are commits: leave their branch, or revert them"
        return "ported", f"no release, closest to {name}, with {of}; to remove the stack use git: {removal}"
    edited_release = stack.rest_is_pristine(pristine) or target.version == stack.release.name
    carry = f"make port FRAMEWORK={framework} FROM={stack.release.name} TO={target.root}"
    result = "makes a branch of its commits with the stack" if (target.root / ".git").exists() else "ports the stack"
    remedy = f"make drift {target.variable} lists them, {carry} {result}"
    if edited_release:
        commit = f"if they are a later commit's or a fork's, {remedy}"
        return "dirty", f"{name}, but for {first_three(unknown)}; save your edits, then {reset}; {commit}"
    share = f"of the {len(stack.before)} files that its stack hooks, {len(unknown)} differ: {first_three(unknown)}"
    nearest = f"matches none of {framework} {', '.join(by_name)}; the closest is {stack.release.name}"
    return "foreign", f"{nearest}, {share}; {remedy}"


def drift(path: Path, project: Path = REPO, framework: Framework = VERL) -> list[str]:
    """Report, per patch, which of its files differ between the target and the closest release; changes nothing."""
    with locked(path, framework) as target:
        blobs, record = target.blobs(), read_record(target)
    pristine = record.undone(blobs) if record else blobs
    stack = closest(pristine, load_stacks(project, framework))
    changed = {path: "changed" if path in pristine else "gone" for path in stack.changed(pristine)}
    lines = [f"closest to {stack.release}: {len(changed)} of the {len(stack.before)} files that its stack hooks differ"]
    for patch in stack.patches:
        drifted = [f"    {changed[path]:8} {path}" for path, _, _ in patch.blobs if path in changed]
        lines += [f"{patch.name}: {len(drifted)} of {len(patch.blobs)} files", *drifted] if drifted else []
    return lines
