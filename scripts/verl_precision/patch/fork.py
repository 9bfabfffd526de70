"""Port to a fork that is a git checkout: make a branch of it, and name its commits that change hooked files."""

import re
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
    """The commit that is checked out at ``root``, the top of a git checkout."""

    root: Path
    commit_id: str
    package: str

    @property
    def date(self) -> str:
        """The commit's date; as that of the commits after it, it keeps ``git log --since`` from ending at them."""
        return git("log", "-1", "--format=%cI", self.commit_id, cwd=self.root).strip()

    @property
    def blobs(self) -> dict[str, str]:
        """The blob id of each file of the package in the commit, by path."""
        blobs = blobs_of(self.root, self.commit_id)
        return {path: blob for path, blob in blobs.items() if path.startswith(f"{self.package}/")}


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
    return Fork(root, commit_id, package)


def branch_fork(fork: Fork, name: str, stack: Stack, scratch: Path) -> Path:
    """Clone the fork into ``scratch``, add the verbatim files on a new branch, and tag that as checkout does.

    The branch is ``precision/<release of the stack>``, and the fork is the remote ``origin``.
    """
    tree = scratch / "tree"
    git("clone", "--quiet", "--no-tags", "--no-checkout", str(fork.root), str(tree), cwd=scratch)
    git("checkout", "--quiet", "-b", branch_name(stack), fork.commit_id, cwd=tree)
    commit_copied(stack, name, tree, fork.date)
    return tree


def branch_name(stack: Stack) -> str:
    return f"precision/{stack.release.name}"


def fork_commits(fork: Fork, stack: Stack) -> Iterator[str]:
    """Yield a line for each commit that changed a hooked file since it was the release's, newest first.

    A hooked file that never was the release's is named with the commit that changed it last, and before all, files of
    the package that git does not know.
    """
    options = ("--others", "--exclude-standard", "--", fork.package)
    if unknown := git("ls-files", *options, cwd=fork.root).splitlines():
        yield f"not in git, so not in the branch: {first_three(unknown)}"
    now = fork.blobs
    commits: dict[str, list[str]] = {}
    unrelated = []
    for path in stack.changed(now):
        log = git("log", "--topo-order", "--no-renames", "--no-abbrev", "--raw", "--format=%x00%H", "--", path,
                  cwd=fork.root)  # fmt: skip
        history = [(entry[:40], re.findall(r"^:\S+ \S+ \S+ (\S+)", entry, re.M)) for entry in log.split("\0")[1:]]
        since = next((each for each, after in history if stack.before[path] in after), None)
        if since is None:
            last = history[0][0] if history else None
            unrelated.append(f"    {path}" + (f": last changed by {subject(fork, last)}" if last else ""))
            continue
        for each in git("rev-list", f"{since}..{fork.commit_id}", "--", path, cwd=fork.root).split():
            commits.setdefault(each, []).append(path)
    release = stack.release.name
    if commits:
        newest = [each for each in git("rev-list", "--topo-order", "HEAD", cwd=fork.root).split() if each in commits]
        yield f"commits since {release} that change patched files: {len(commits)}"
        yield from (f"    {subject(fork, each)}: {', '.join(sorted(commits[each]))}" for each in newest)
    if unrelated:
        yield f"patched files without the content of {release} in their history: {len(unrelated)}"
        yield from unrelated


def subject(fork: Fork, commit_id: str) -> str:
    return git("log", "-1", "--format=%h %s", commit_id, cwd=fork.root).strip()
