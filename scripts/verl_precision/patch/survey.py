"""Survey what no hook of a ported stack shows: whether the other tree is older, and which of its new files to read."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl_precision.patch.closest import closest, unfit_hunks
from verl_precision.patch.export import blobs_of
from verl_precision.patch.git import git, read_blob
from verl_precision.patch.stack import Stack

# What the code around a hook does, by the name in the report.
DOES = {
    "autocast": r"autocast\(",
    "bfloat16": r"bfloat16|\bbf16\b",
    "backward": r"\.backward\(",
    "optimizer step": r"optimizer\.step\(|def optimizer_step",
    "weights to a rollout": r"update_weights|load_weights|get_per_tensor_param",
}
DEFINITION = r"^\s*(async def|def|class) (\w+)"


def survey(stack: Stack, tree: Path, old: str, new: str, moved: Mapping[str, str]) -> Iterator[str]:
    """Yield lines on the commit ``new`` of another version against ``old``, the release of the stack.

    Args:
        tree: a git tree with both commits.
        moved: new paths of files by old ones.
    """
    package = stack.release.framework.name
    before, after = (definitions(tree, each, package) for each in (old, new))
    lacks, own = len(before - after), len(after - before)
    if lacks > own:
        yield f"looks older than {stack.release}: lacks {lacks} of its functions and classes, and has {own} others"
    added = git("diff", "--name-only", "--diff-filter=A", "--no-renames", old, new, "--", package, cwd=tree)
    unhooked = {path for path in added.splitlines() if path.endswith((".py", ".yaml"))} - set(moved.values())
    found = {path: does for path in sorted(unhooked) if (does := deeds(tree, new, path))}
    if found:
        yield f"new files with similar code, which no patch changes: {len(found)}"
        yield from (f"    {path}: {', '.join(does)}" for path, does in found.items())


def nearest(stack: Stack, tree: Path, commit_id: str, stacks: list[Stack]) -> Iterator[str]:
    """Yield a line where another release's stack fits a commit of another version better than ``stack``."""
    blobs = blobs_of(tree, commit_id)

    def read(path: str) -> bytes:
        return read_blob(blobs[path], cwd=tree)

    other = closest(blobs, read, stacks)
    (theirs, of), (ours, all_ours) = (unfit_hunks(each, blobs, read) for each in (other, stack))
    if theirs / of < ours / all_ours:
        yield f"closer to {other.release}: {theirs} of {of} hunks do not fit, against {ours} of {all_ours} here"


def definitions(tree: Path, commit_id: str, package: str) -> set[str]:
    """Return the names of all functions and classes of the package in a commit."""
    found = git("grep", "-hE", DEFINITION, commit_id, "--", f"{package}/*.py", cwd=tree)
    return {name for _, name in re.findall(DEFINITION, found, re.M)}


def deeds(tree: Path, commit_id: str, path: str) -> list[str]:
    """Return what of ``DOES`` the file does."""
    content = read_blob(f"{commit_id}:{path}", cwd=tree).decode(errors="replace")
    return [name for name, pattern in DOES.items() if re.search(pattern, content)]
