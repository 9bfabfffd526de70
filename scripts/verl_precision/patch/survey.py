"""Survey what no hunk of a ported stack shows: a release that fits better, and new files with similar code."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from verl_precision.patch.closest import closest, unfit_hunks
from verl_precision.patch.export import blobs_of
from verl_precision.patch.git import git, read_blob, run_git
from verl_precision.patch.stack import Stack

# What hooked code does: autocast, name a 16-bit dtype, step the optimizer, send weights to a rollout.
SIMILAR = (
    r"autocast\(|bfloat16|\bbf16\b|\.backward\(|optimizer\.step\(|def optimizer_step"
    r"|update_weights|load_weights|get_per_tensor_param"
)


def survey(
    stack: Stack, tree: Path, old: str, new: str, moved: Mapping[str, str], stacks: list[Stack]
) -> Iterator[str]:
    """Yield lines on the commit ``new`` of another version against ``old``, the release of the stack.

    Args:
        tree: a git tree with both commits, whose HEAD has the files of ``new``.
        moved: new paths of files by old ones.
        stacks: of all releases.
    """
    kinds = (f"{stack.release.framework.name}/*.{ending}" for ending in ("py", "yaml"))
    added = git("diff", "--name-only", "--diff-filter=A", "--no-renames", old, new, "--", *kinds, cwd=tree).splitlines()
    if unhooked := set(added) - set(moved.values()):
        found = run_git("grep", "--cached", "-lE", SIMILAR, "--", *unhooked, cwd=tree).stdout.decode().splitlines()
        if found:
            yield f"new files with similar code, which no patch changes: {len(found)}"
            yield from (f"    {path}" for path in found)

    blobs = blobs_of(tree, new)

    def read(path: str) -> bytes:
        return read_blob(blobs[path], cwd=tree)

    other = closest(blobs, read, stacks)
    (theirs, of), (ours, all_ours) = (unfit_hunks(each, blobs, read) for each in (other, stack))
    if theirs / of < ours / all_ours:
        yield f"closer to {other.release}: {theirs} of {of} hunks do not fit, against {ours} of {all_ours} here"
