"""Port to a fork that is a git checkout: make a branch of it, and name its commits that change hooked files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.format import first_three
from verl_precision.patch.checkout import commit_copied
from verl_precision.patch.export import blobs_of
from verl_precision.patch.git import git, head
from verl_precision.patch.stack import Stack
from verl_precision.patch.target import Target


@dataclass(frozen=True)
class Fork:
    """The commit that is checked out at ``root``, the top of a git checkout, and the blob ids of the package in it.

    Args:
        date: the commit's, which later commits take, too: ``git log --since`` would end at older ones.
    """

    root: Path
    commit_id: str
    date: str
    blobs: dict[str, str]


def find_fork(source: Target) -> Fork | None:
    """Return the fork that ``source`` is a checkout of; None where it is not the top of one.

    Raises:
        Refused: the checkout has no commit, or changes of the package that are not committed.
    """
    root, package = source.root, source.framework.name
    if not (root / ".git").exists():
        return None
    commit_id = head(root, f"{root} is a git checkout without a commit; commit the fork first")
    options = ("--porcelain", "--untracked-files=no", "--", package)
    if changed := git("--no-optional-locks", "status", *options, cwd=root).splitlines():
        raise Refused(f"{root} has uncommitted changes: {changed[0][3:]}; commit or stash them, then port again")
    date = git("log", "-1", "--format=%cI", commit_id, cwd=root).strip()
    return Fork(root, commit_id, date, blobs_of(root, commit_id, package))


def branch_fork(fork: Fork, branch: str, name: str, stack: Stack, scratch: Path) -> Path:
    """Clone the fork into ``scratch``, add the verbatim files on a new branch, and tag that as checkout does.

    The fork is the remote ``origin``.
    """
    tree = scratch / "tree"
    git("clone", "--quiet", "--no-tags", "--no-checkout", str(fork.root), str(tree), cwd=scratch)
    git("checkout", "--quiet", "-b", branch, fork.commit_id, cwd=tree)
    commit_copied(stack, name, tree, fork.date)
    return tree


def fork_commits(fork: Fork, stack: Stack) -> Iterator[str]:
    """Yield a line on files that git does not track, and one for each commit that changed a hooked file, newest first.

    The commits are those since the file was the release's; a file that never was, as after a squash, has none.
    """
    package, release = stack.release.framework.name, stack.release.name
    if unknown := git("ls-files", "--others", "--exclude-standard", "--", package, cwd=fork.root).splitlines():
        yield f"not in git, so not in the branch: {first_three(unknown)}"
    commits: dict[str, list[str]] = {}
    for path in stack.changed(fork.blobs):
        # The newest commit that replaced the release's content; the file has another one now.
        find = f"--find-object={stack.before[path]}"
        first = git("log", "-1", "--format=%H", "--no-renames", find, "--", path, cwd=fork.root).strip()
        if first:
            for each in git("rev-list", f"{first}~..HEAD", "--", path, cwd=fork.root).split():
                commits.setdefault(each, []).append(path)
    if commits:
        yield f"commits since {release} that change patched files: {len(commits)}"
        for line in git("log", "--topo-order", "--format=%H %h %s", cwd=fork.root).splitlines():
            commit_id, _, subject = line.partition(" ")
            if commit_id in commits:
                yield f"    {subject}: {', '.join(sorted(commits[commit_id]))}"
