"""Determine the state of a target: its release, whether it is patched, and the files that differ."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_precision.format import first_three
from verl_precision.patch.closest import closest
from verl_precision.patch.git import unfinished
from verl_precision.patch.record import Record, likely, read_record
from verl_precision.patch.releases import VERL, Framework
from verl_precision.patch.stack import Stack, load_stacks, whole
from verl_precision.patch.target import Target, opened
from verl_precision.paths import REPO


@dataclass(frozen=True)
class Status:
    """The state of a target.

    ``state`` is unpatched, patched, outdated (patched by another version of the stack), interrupted (the next apply or
    unapply repairs it), half-patched, dirty, foreign, or ported (created by make port).
    """

    state: str
    detail: str  # one line on what the state means here and what to do
    release: str | None = None  # of the tree; None if it matches none
    exact: bool = False  # whether the files that the stack does not touch are the wheel's
    stack: str | None = None  # id of the release's stack in this project
    stamp: dict[str, str] | None = None  # content of the target's stamp
    series: str = ""  # of ``stack``; empty where the release has only one

    def __str__(self) -> str:
        others = "; other files than these are not those of the wheel"
        return f"{self.state}: {self.detail}" + (others if self.stack and not self.exact else "")


def status(path: Path, project: Path = REPO, framework: Framework = VERL) -> Status:
    """Return a target's state; changes nothing."""
    target = opened(path, framework)
    blobs = target.blobs()
    return examine(target, blobs, read_record(target, blobs), load_stacks(project, framework))


def examine(target: Target, blobs: Mapping[str, str], record: Record | None, stacks: list[Stack]) -> Status:
    """Return the target's state, from its blobs, its record and the stacks of its framework."""
    stamped = record and target.stamp.is_file() and target.stamp.read_bytes() == record.stamp_file
    stamp = record.stamp if stamped else None
    if record and (fault := changed_since_apply(target, blobs, record)):
        return Status(*fault, record.release, stamp=stamp)
    pristine = record.undone(blobs) if record else blobs
    matching = [stack for stack in stacks if not stack.mismatches(pristine)]
    if not matching:
        return Status(*unmatched(target, pristine, record, stacks), stamp=stamp)
    exact = any(stack.rest_is_pristine(pristine) for stack in matching)
    stack = likely(record, [stack for stack in matching if stack.rest_is_pristine(pristine) or not exact])
    state, detail = matched(target, stack, blobs, record, bool(stamp))
    return Status(state, detail, stack.release.name, exact, stack.id, stamp, stack.series)


def changed_since_apply(target: Target, blobs: Mapping[str, str], record: Record) -> tuple[str, str] | None:
    """Return state and detail of a tree whose recorded files were edited or removed since apply."""
    name = target.framework.name
    unapply = f"make unapply-patches {target.variable}"
    if edited := record.edited(blobs):
        keep = f"{unapply} FORCE=yes restores {name} {record.release} and keeps each as FILE.edited"
        return "dirty", f"edited after apply: {first_three(edited)}; {keep}"
    if not target.installed:
        return "half-patched", f"{name} was uninstalled; {unapply} deletes what apply added, then install {name} again"
    if removed := record.removed(blobs):
        return "dirty", f"removed after apply: {first_three(removed)}; {unapply} restores them"
    return None


def matched(
    target: Target, stack: Stack, blobs: Mapping[str, str], record: Record | None, stamped: bool
) -> tuple[str, str]:
    """Return state and detail of a tree that equals the stack's release once the record is undone."""
    name = str(stack.release)
    if not record:
        return "unpatched", name
    apply = "apply with FIXES=yes" if stack.fixes else "apply"
    hooked = record.hooked(blobs)
    bare = [path for path in record.replaced if path not in hooked] + [p for p in record.added if p not in blobs]
    if stamped and hooked and not bare:
        if (record.release, record.stack) == (stack.release.name, stack.id):
            return "patched", f"{name} with {stack.title}"
        return "outdated", f"{name} with stack {record.stack}; {apply} brings it to {stack.title}"
    restore = f"make unapply-patches {target.variable} restores the release, then {apply} again"
    if stamped and hooked:
        what = "not patched" if bare[0] in blobs else "missing"
        return "half-patched", f"{name} with stack {record.stack}, but {bare[0]} is {what}; {restore}"
    if stamped:
        installed = f"{target.framework.name} was installed or checked out again over stack {record.stack}"
        return "interrupted", f"{name}: {installed}; {apply} patches it again, unapply deletes what the stack left"
    cause = "apply or unapply was interrupted, or files were restored"
    return "interrupted", f"{name}: {cause}; unapply, or {apply}, repairs it"


def unmatched(
    target: Target, pristine: Mapping[str, str], record: Record | None, stacks: list[Stack]
) -> tuple[str, str]:
    """Return state and detail of a tree that matches no release, with the closest one and the files that differ."""
    framework = target.framework.name
    by_name = whole(stacks)
    if record and record.release not in by_name:
        origin = f"another version of this project, for {framework} {record.release}, stack {record.stack}"
        return "foreign", f"patched by {origin}; make unapply-patches {target.variable} removes that"
    if not record and (stamp := target.read_stamp()):
        name = f"{framework} {stamp['release']} with stack {stamp['stack']}"
        lost = f"without the record in {target.framework.bookkeeping}"
        return "half-patched", f"{name}, but {lost}; {target.way_out}"
    if record and record.replaced:
        stack = by_name[record.release]
    else:
        stack = closest(pristine, target.read, [*by_name.values()])
    own = [each for each in stacks if each.release == stack.release]
    stack = min(own, key=lambda each: (len(unknown_files(each, pristine)), -len(each.before)))
    # A tree with most of the files that apply adds was patched by a port; its hooks may match no release.
    if not record and 2 * len(stack.added.keys() & pristine.keys()) > len(stack.added):
        name = f"the patches of {stack.release}, or ones close to them, are commits"
        if begun := unfinished(target.root):
            return "half-patched", f"{name}, and a {begun} is to finish: git -C {target.root} {begun} --continue"
        return "ported", f"{name}; to remove them, switch branches or revert them"
    return edited_or_foreign(target, stack, pristine, record, by_name)


def unknown_files(stack: Stack, blobs: Mapping[str, str]) -> list[str]:
    """Return the files of the stack that have neither the release's nor the patched content."""
    patched = {**stack.after, **stack.copied}
    return [path for path in stack.mismatches(blobs) if blobs.get(path) != patched.get(path, "")]


def edited_or_foreign(
    target: Target, stack: Stack, pristine: Mapping[str, str], record: Record | None, releases: Iterable[str]
) -> tuple[str, str]:
    """Return state and detail of a tree with edits of the stack's release, or with none of the releases."""
    hooks, unknown = f"merge the patches: {port_command(target, stack)}", unknown_files(stack, pristine)
    # Two releases differ in a third of their hooked files or more.
    few = len(stack.unknown(pristine)) < len(stack.before) / 4
    if record or few or stack.rest_is_pristine(pristine) or target.version == stack.release.name:
        reset = "check them out again" if (target.root / ".git").exists() else f"reinstall {stack.release}"
        files = unknown or stack.mismatches(pristine)  # or patched files without the record of apply
        detail = f"{stack.release} except {first_three(files)}; save your edits, then {reset}"
        return "dirty", detail if record else f"{detail}, or keep them and {hooks}"
    nearest = f"matches none of {target.framework.name} {', '.join(releases)}; the closest is {stack.release.name}"
    share = f"of the {len(stack.before)} files that its patches change, {len(unknown)} differ: {first_three(unknown)}"
    return "foreign", f"{nearest}, {share}; {hooks}"


def apply_command(root: Path, series: str) -> str:
    """Return the command that applies these series of patches to the verl in ``root``."""
    return f"make apply-patches VERL={shlex.quote(str(root))}{' FIXES=yes' * series.endswith('fixes')}"


def port_command(target: Target, stack: Stack) -> str:
    option = "" if target.framework == VERL else f" FRAMEWORK={target.framework.name}"
    return f"make port{option} FROM={stack.release.name} TO={shlex.quote(str(target.root))}"


def drift(path: Path, project: Path = REPO, framework: Framework = VERL) -> list[str]:
    """Report, per patch, which of its files differ between the target and the closest release; changes nothing."""
    target = opened(path, framework)
    blobs, stacks = target.blobs(), load_stacks(project, framework)
    record = read_record(target, blobs)
    pristine = record.undone(blobs) if record else blobs
    stack = closest(blobs, target.read, [*whole(stacks).values()])
    changed = {path: "changed" if path in pristine else "gone" for path in stack.changed(pristine)}
    lines = [
        f"closest to {stack.release}: {len(changed)} of the {len(stack.before)} files that its patches change differ"
    ]
    for patch in stack.patches:
        drifted = [f"    {changed[path]:8} {path}" for path, _, _ in patch.blobs if path in changed]
        name = f"{patch.name} (fixes)" if patch.fixes else patch.name
        lines += [f"{name}: {len(drifted)} of {len(patch.blobs)} files", *drifted] if drifted else []
    return lines
