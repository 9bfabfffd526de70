"""Merge the hunks of a stack one by one into another tree, and report the outcome of each."""

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from verl_precision.errors import Refused
from verl_precision.files import write
from verl_precision.patch.git import git, read_blob, run_git
from verl_precision.patch.stack import Patch, Stack

OUTCOMES = SAME, MERGED, PRESENT, CONFLICT = "same", "merged", "present", "conflict"


class MergedHunk(NamedTuple):
    """One hunk of a patch and its outcome in the other tree.

    ``path`` is ``old -> new`` if the file moved, ``location`` is the hunk's line and function. ``outcome`` is same (its
    file did not change), merged (it did, or moved), present (in the other tree) or conflict.
    """

    path: str
    location: str
    outcome: str
    reason: str = ""


def renames(tree: Path, old: str, new: str, folder: str = ".") -> dict[str, str]:
    """Return the new path, by the old one, of each file below ``folder`` that git detects as renamed."""
    options = ("--find-renames", "--diff-filter=R", "--name-status")
    lines = git("diff", *options, old, new, "--", folder, cwd=tree).splitlines()
    return dict(line.split("\t")[1:] for line in lines)


def merge_hunks(stack: Stack, tree: Path, moved: Mapping[str, str]) -> Iterator[tuple[Patch, list[MergedHunk]]]:
    """Merge the hunks one by one into the files of the commit of ``tree``; yield each patch with their outcomes.

    A hunk that conflicts is left out, so that hunks that depend on it conflict too. ``moved``: new paths by old ones.
    """
    now = {path: moved.get(path, path) for path in stack.before}
    known = set(git("ls-tree", "-r", "--name-only", "HEAD", cwd=tree).splitlines())
    ours = {path: read_blob(f"HEAD:{now[path]}", cwd=tree) for path in stack.before if now[path] in known}
    with tempfile.TemporaryDirectory() as folder:
        for patch in stack.patches:
            hunks_of_patch = []
            for path, before, _ in patch.blobs:
                base = read_blob(before, cwd=tree)
                same = ours.get(path) == base and path not in moved
                shown = f"{path} -> {moved[path]}" if path in moved else path
                for location, hunk in hunks(patch, path):
                    outcome, why = CONFLICT, "there is no such file"
                    if path in ours and (merged := merge(ours[path], base, hunk, Path(folder))) is not None:
                        outcome, why = SAME if same else PRESENT if merged == ours[path] else MERGED, ""
                        ours[path] = merged
                    elif path in ours:
                        why = reason(hunk, ours[path].decode(errors="replace"))
                    hunks_of_patch.append(MergedHunk(shown, location, outcome, why))
            yield patch, hunks_of_patch


def hunks(patch: Patch, path: str) -> Iterator[tuple[str, str]]:
    """Yield location and text of each hunk of the patch in this file."""
    (diff,) = re.findall(rf"^diff --git a/{re.escape(path)} b/.*?(?=^diff --git |\Z)", patch.text, re.M | re.S)
    for hunk in re.findall(r"^@@ .*?(?=^@@ |\Z)", diff, re.M | re.S):
        line, function = re.match(r"@@ -(\d+)\S* \S+ @@ ?(.*)", hunk).groups()
        yield f"line {line}" + (f" in {function.rstrip(':')}" if function else ""), hunk


def merge(ours: bytes, base: bytes, hunk: str, scratch: Path) -> bytes | None:
    """Return ``ours`` with the hunk, which fits ``base``, merged in; None for a conflict."""
    for name, content in (("ours", ours), ("base", base), ("theirs", base)):
        write(scratch / name, content)
    git("apply", "--whitespace=nowarn", "-", cwd=scratch, stdin=f"--- a/theirs\n+++ b/theirs\n{hunk}")
    done = run_git("merge-file", "-p", "-q", "ours", "base", "theirs", cwd=scratch)
    if done.returncode > 127:  # fewer is the number of conflicts
        raise Refused(f"git merge-file failed: {done.stderr.decode().strip()}")
    return None if done.returncode else done.stdout


def reason(hunk: str, ours: str) -> str:
    """Return why a hunk conflicts with the file ``ours``."""
    lines = {line.strip() for line in ours.splitlines()}
    old, new = ([line[1:].strip() for line in hunk.splitlines() if line[:1] == sign] for sign in "-+")
    if new and lines.issuperset(new):
        return "its new lines are in the file, here or elsewhere"
    if lost := [line for line in old if line not in lines]:
        return f"{len(lost)} of its {len(old)} old lines are gone, first: {lost[0]}"
    return "its lines, or those around them, changed"


def report(stack: Stack, target: str, outcomes: dict[Patch, list[MergedHunk]]) -> Iterator[str]:
    """Yield a line for each patch; below it the files that hunks merged into, and hunks present or in conflict."""
    total = Counter(hunk.outcome for merged in outcomes.values() for hunk in merged)
    yield f"{stack.release} -> {target}: {len(outcomes)} patches, {total.total()} hunks: {counts(total)}"
    for patch, merged in outcomes.items():
        count = Counter(hunk.outcome for hunk in merged)
        whole = next((each for each in OUTCOMES if count[each] == len(merged)), MERGED)
        outcome = CONFLICT if count[CONFLICT] else whole
        yield f"{outcome:8} {patch.name}: {counts(count)}"
        for path, number in Counter(hunk.path for hunk in merged if hunk.outcome == MERGED).items():
            yield f"    {MERGED:8} {path}: {number}"
        for hunk in merged:
            if hunk.outcome in (PRESENT, CONFLICT):
                yield f"    {hunk.outcome:8} {hunk.path}: {hunk.location}{hunk.reason and ': '}{hunk.reason}"


def counts(outcomes: Counter) -> str:
    return ", ".join(f"{outcomes[each]} {each}" for each in OUTCOMES if outcomes[each])
