"""Check a release's stack on its wheel: apply, compile, unapply, re-export."""

import compileall
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.patch.apply import apply, unapply
from verl_precision.patch.commits import check_re_export, package_trees
from verl_precision.patch.git_objects import package_blobs
from verl_precision.patch.releases import VERL, Framework, Release, find_release
from verl_precision.patch.stack import release_stacks
from verl_precision.patch.status import status
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.paths import REPO


def check(name: str, project: Path = REPO, framework: Framework = VERL) -> str:
    """Check the stacks of a release on its wheel and return the counts of the stack of all patches, in one line.

    The headers are complete; the wheel is the known one; apply makes the recorded trees, the second from the first;
    every file that it writes compiles; unapply restores the wheel byte for byte; the patches are what export writes.
    The first fault raises Refused.
    """
    release = find_release(name, project, framework)
    stacks = release_stacks(release, project)
    stack = stacks[-1]
    if stack.fixes and not any(patch.fixes for patch in stack.patches):
        raise Refused(f"{framework.home(project)}/fixes has files, and no patch of {release} is of the series fixes")
    with tempfile.TemporaryDirectory() as scratch:
        root = unpacked_wheel(name, Path(scratch), framework)
        before, blobs = contents(root), package_blobs(root, framework)
        for each in stacks:  # the second on top of the first
            apply(root, project, framework, fixes=each.fixes)
            after = status(root, project, framework)
            if (after.state, after.stack) != ("patched", each.id):
                raise Refused(f"{release} is {after.state} after apply: {after.detail}")
            if not after.exact:
                raise Refused(f"files of {release} that the stack does not touch are not those of tree_before")
            if package_blobs(root, framework) != {**blobs, **each.after, **each.copied}:
                raise Refused(f"apply on {release} changes other files than the stack names")
            for path in [*each.after, *each.copied]:
                if path.endswith(".py") and not compileall.compile_file(root / path, quiet=2):
                    raise Refused(f"{path} of {release} does not compile after apply")
        unapply(root, project, framework)
        if contents(root) != before:
            raise Refused(f"unapply does not restore the wheel of {release}")
        check_re_export(stack, root)
    recorded = (release.tree_after, release.tree_after_fixes)
    if (trees := package_trees(blobs, stack.patches)) != recorded:
        trees, recorded = (" and ".join(filter(None, each)) for each in (trees, recorded))
        raise Refused(f"the series makes tree {trees}, but versions.toml records {recorded}; checkout and export")
    return f"{len(stack.patches)} patches, {len(stack.after)} files patched, {len(stack.copied)} added"


def contents(root: Path) -> dict[Path, bytes | None]:
    """Return the bytes of each file below ``root``, None for a folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def check_all(releases: Iterable[Release]) -> list[tuple[Release, bool, str]]:
    """Check the stacks of each release; return it with whether they pass, and the counts or the fault."""

    def outcome(release: Release) -> tuple[Release, bool, str]:
        try:
            return release, True, check(release.name, framework=release.framework)
        except Refused as fault:
            return release, False, str(fault)

    with ThreadPoolExecutor() as pool:  # the work is mostly git's
        return list(pool.map(outcome, releases))
