"""Identify the verl that a job would run on by its files; only its precision module is imported."""

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

from verl_precision.doctor.dtype_rules import KNOWN, RULES, UNKNOWN, Rule
from verl_precision.format import first_three
from verl_precision.patch.closest import closest
from verl_precision.patch.git_objects import blob_id
from verl_precision.patch.precision_module import load_precision, precision_file
from verl_precision.patch.record import read_record
from verl_precision.patch.releases import Release
from verl_precision.patch.stack import Stack, load_stacks, whole
from verl_precision.patch.status import apply_command, examine
from verl_precision.patch.target import opened
from verl_precision.patch.wheels import wheel
from verl_precision.paths import REPO

RULE_FILES = sorted({f"verl/{path}" for rule in RULES for path in (rule.path, rule.hook) if path})


@dataclass(frozen=True)
class Tree:
    """A verl and its state.

    Args:
        release: its release, or the nearest one of a foreign tree.
        table: the release whose lines of the table of dtype rules apply.
        state: patched, unpatched or foreign.
        status: the state that `make status` reports.
        files: the state of each file that a rule names: ``release`` (as in the wheel), ``patched`` or ``unknown``.
        advice: what `make status` reports of a foreign tree, or the files of a release that are not the wheel's.
    """

    root: Path
    release: Release
    table: str
    state: str
    status: str
    stack: str | None
    files: Mapping[str, str]
    advice: str
    apply_command: str

    @property
    def name(self) -> str:
        if self.state == "foreign":
            return f"this verl (nearest release {self.release.name})"
        return f"verl {self.release.name}"

    @property
    def title(self) -> str:
        return f"{self.name}, {'patched' if self.precision else 'unpatched'}"

    @cached_property
    def precision(self) -> ModuleType | None:
        """The tree's own ``verl.utils.precision``, None where it has none. Imports torch."""
        if precision_file(self.root) is None:
            return None
        return load_precision(self.root, f"precision_of_tree_{id(self)}")  # the modules of several are in use at once

    def line(self, rule: Rule) -> int | None:
        """Return the number of the line that a rule quotes; where the table has none, of the nearest with its text."""
        number = rule.lines[self.table]
        if self.table == self.release.name:
            return number
        file = self.root / "verl" / rule.path
        lines = file.read_text().splitlines() if file.exists() else []
        quoting = [each for each, line in enumerate(lines, start=1) if rule.text in line]
        return min(quoting, key=lambda each: abs(each - number), default=None)


def identify_tree(target: Path, project: Path = REPO) -> Tree:
    """Return which verl ``target`` contains; changes nothing.

    Raises:
        Refused: ``target`` is no verl, or a release's wheel to compare it with is not available.
    """
    found = opened(target)
    blobs, stacks, stamp = found.blobs(), load_stacks(project), found.read_stamp()
    record = read_record(found, blobs)
    status = examine(found, blobs, record, stacks)
    state = {"unpatched": "unpatched", "patched": "patched", "outdated": "patched"}.get(status.state, "foreign")
    by_name = whole(stacks)
    stack = by_name[status.release] if status.release else closest(blobs, found.read, [*by_name.values()])
    own = [each for each in stacks if each.release == stack.release]
    advice = f"{status.state}: {status.detail}" if state == "foreign" else ""
    if state != "foreign" and status.exact:
        hooked = record.replaced if record else {}
        files = {path: "patched" if path in hooked else "release" for path in RULE_FILES}
    else:
        files = compare_files(blobs, own)
        if state != "foreign":
            others = edited_files(record.undone(blobs) if record else blobs, stack.release)
            advice = f"edited: {first_three(others)}, which no patch changes"
    return Tree(
        root=found.root,
        release=stack.release,
        table=table_release(stack.release, {name: each.release for name, each in by_name.items()}),
        state=state,
        status=status.state,
        stack=stamp and stamp["stack"],
        files=files,
        advice=advice,
        apply_command=apply_command(found.root, status.series),
    )


def table_release(release: Release, releases: Mapping[str, Release]) -> str:
    """Return the release whose lines of the table apply: itself, or the one that it was ported from, and so on."""
    name = release.name
    while name not in KNOWN and name in releases and releases[name].ported_from:
        name = releases[name].ported_from
    return name if name in KNOWN else release.name


def edited_files(pristine: Mapping[str, str], release: Release) -> list[str]:
    """Return the files in which a tree without its patches differs from the release's wheel."""
    with zipfile.ZipFile(wheel(release.name)) as archive:
        names = [name for name in archive.namelist() if name.startswith("verl/") and not name.endswith("/")]
        released = {name: blob_id(archive.read(name)) for name in names}
    return sorted(path for path in {*released, *pristine} if released.get(path) != pristine.get(path))


def compare_files(blobs: Mapping[str, str], stacks: Sequence[Stack]) -> dict[str, str]:
    """Return the state of each file of the rules by its content: ``release``, ``patched`` or ``unknown``."""
    with zipfile.ZipFile(wheel(stacks[0].release.name)) as pristine:
        names = set(pristine.namelist())
        released = {path: blob_id(pristine.read(path)) for path in RULE_FILES if path in names}
    files = {}
    for path in RULE_FILES:
        blob = blobs.get(path)
        patched = {stack.after.get(path) for stack in stacks} - {None, released.get(path)}
        files[path] = "release" if blob == released.get(path) else "patched" if blob in patched else UNKNOWN
    return files
