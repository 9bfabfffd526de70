"""Find the stack that fits a tree best, by its hunks, without the files of its release.

A hunk fits a file that contains its old lines or, if the tree is patched or upstream has the change, its new ones. The
number of hunks that do not fit is close to the number of conflicts of a port.
"""

from collections.abc import Callable, Mapping

from verl_precision.patch.hunks import hunks
from verl_precision.patch.stack import Stack


def closest(blobs: Mapping[str, str], read: Callable[[str], bytes], stacks: list[Stack]) -> Stack:
    """Return the stack with the smallest share of hunks that do not fit a tree of these blobs, by path.

    A tie is decided by the largest share of hooked files, patched or not, in the tree, then by the newest release.
    """

    def distance(stack: Stack) -> tuple[float, float]:
        unfit, total = unfit_hunks(stack, blobs, read)
        return unfit / total, len(stack.unknown(blobs)) / len(stack.before)

    return min(reversed([stack for stack in stacks if stack.before]), key=distance)


def unfit_hunks(stack: Stack, blobs: Mapping[str, str], read: Callable[[str], bytes]) -> tuple[int, int]:
    """Return the number of the stack's hunks that do not fit a tree, and the number of all its hunks."""
    sides = {path: [] for path in stack.before}
    for patch in stack.patches:
        for path, _, _ in patch.blobs:
            sides[path] += [replaced_lines(hunk) for _, hunk in hunks(patch, path)]
    unfit = 0
    for path, lines in sides.items():
        if path not in blobs:
            unfit += len(lines)
        elif blobs[path] not in (stack.before[path], stack.after[path]):
            text = "\n" + read(path).decode(errors="replace").replace("\r\n", "\n") + "\n"
            unfit += min(count_unfit(text, lines), count_unfit(text, [(new, old) for old, new in reversed(lines)]))
    return unfit, sum(map(len, sides.values()))


def replaced_lines(hunk: str) -> tuple[str, str]:
    """Return the old and the new lines of a hunk, each between two line breaks."""
    lines = hunk.split("\n")[1:-1]
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in side) for side in ("- ", "+ "))
    return f"\n{old}", f"\n{new}"


def count_unfit(text: str, sides: list[tuple[str, str]]) -> int:
    """Return the number of hunks with neither side in the text; each old side found is replaced for the next hunks."""
    unfit = 0
    for old, new in sides:
        unfit += old not in text and new not in text
        text = text.replace(old, new, 1)
    return unfit
