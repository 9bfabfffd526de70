"""Port a release's stack to another release or to a fork, as commits.

The merge base is the release that the stack was made for, so a hook is placed by the code that it changes, not by line
numbers. It conflicts if its own lines changed. Renamed files that git detects are followed.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.files import sha256
from verl_precision.patch.commits import BASE, blobs_of, commit_base, commit_copied, commit_stack, scratch_beside
from verl_precision.patch.git import DATE, cherry_pick, git, run_git
from verl_precision.patch.git_objects import package_blobs, package_files, package_tree_id
from verl_precision.patch.hunks import merge_hunks, renames, report
from verl_precision.patch.releases import VERL, Framework, Release, add_release, find_release, load_releases
from verl_precision.patch.stack import Stack, load_stack
from verl_precision.patch.target import Target, find_target
from verl_precision.patch.wheels import download, unpack, unpacked_wheel
from verl_precision.paths import INSTALLED, REPO

# What hooked code does: autocast, name a 16-bit dtype, step the optimizer, send weights to a rollout.
SIMILAR = (
    r"autocast\(|bfloat16|\bbf16\b|\.backward\(|optimizer\.step\(|def optimizer_step"
    r"|update_weights|load_weights|get_per_tensor_param"
)


@dataclass(frozen=True)
class Fork:
    """The commit that is checked out at ``root``, the top of a git checkout, and the blob ids of the package in it."""

    root: Path
    commit_id: str
    date: str  # the commit's, which later commits take, too: ``git log --since`` would end at older ones
    blobs: dict[str, str]


def port(name: str, to: str, folder: Path, project: Path = REPO, framework: Framework = VERL) -> tuple[list[str], bool]:
    """Make ``folder`` a git tree like checkout's of the release or folder ``to``, with the stack of ``name`` on it.

    git's cherry-pick carries the commits and stops at the first conflict, from which it can be continued. The original
    stack is the branch ``from/<name>``. A release that is not in versions.toml is added to it.
    Return the lines of a report, and whether no conflict is left to resolve.
    """
    stack = load_stack(find_release(name, project, framework), project)
    if not stack.patches:
        raise Refused(f"{stack.release} has no patches to port")
    if Path(to).is_dir() and Path(os.path.abspath(folder)).is_relative_to(Path(os.path.abspath(to), framework.name)):
        raise Refused(f"DIR={folder} is inside the package of {to}; choose another folder")
    with scratch_beside(folder) as (scratch, folder):
        target, root, new_release = destination(to, stack, project, scratch)
        progress(f"making a git tree of {to}")
        fork = root if isinstance(root, Fork) else None
        if fork:
            tree = branch_fork(fork, f"precision/{name}", target, stack, scratch)
        else:
            tree = commit_base(target, root, stack, scratch)
        progress(f"making a git tree of {stack.release} with its patches")
        (scratch / "from").mkdir()
        source = commit_stack(stack, scratch / "from")
        branch = f"from/{name}"
        git("fetch", "--quiet", "--no-tags", str(source), f"stack:{branch}", cwd=tree)
        base, new = f"{branch}~{len(stack.patches)}", BASE + target
        moved = renames(tree, f"{base}^", f"{new}^", framework.name)
        outcomes = {}
        for patch, merged in merge_hunks(stack, tree, moved):
            outcomes[patch] = merged
            progress(f"merged {len(outcomes)}/{len(stack.patches)} {patch.name}")
        similar = list(survey(framework, tree, f"{base}^", f"{new}^", moved))
        progress(f"committing {len(stack.patches)} patches")
        done = cherry_pick(f"{base}..{branch}", tree, fork.date if fork else DATE)
        carried = int(git("rev-list", "--count", f"{new}..HEAD", cwd=tree))
        lines = []
        if new_release and not INSTALLED:  # an installed project stays as it is
            entry = add_release(new_release, framework.home(project) / "versions.toml")
            lines = [f"added to versions.toml, with the family, dependencies and features of {name}:", entry]
        os.replace(tree, folder)
    lines += [*report(stack, target, outcomes), *similar]
    lines += [f"{folder}: {carried} of {len(stack.patches)} patches committed, after the tag {new}"]
    if not done:
        stopped = stack.patches[carried].name
        lines += [f"  {stopped} has conflicts: git status; edit; git add; git cherry-pick --continue"]
    lines += [f"  to review them: git range-diff {base}..{branch} {new}..HEAD"]
    if fork:
        push = f"git -C {folder} push origin precision/{name}"
        lines += [f"  to add them to {fork.root} as the branch precision/{name}: {push}"]
    elif target in load_releases(project, framework):
        lines += [f"  to export them, in a checkout of this project: python3 scripts/verl_precision export {folder}"]
    else:
        lines += [f"  {to} is not a release, so they cannot be exported; to use them: PYTHONPATH={folder}"]
    return lines, done


def survey(framework: Framework, tree: Path, old: str, new: str, moved: Mapping[str, str]) -> Iterator[str]:
    """Yield the files that the commit ``new`` adds to ``old`` and that contain code like that which patches change."""
    kinds = (f"{framework.name}/*.{ending}" for ending in ("py", "yaml"))
    added = git("diff", "--name-only", "--diff-filter=A", "--no-renames", old, new, "--", *kinds, cwd=tree).splitlines()
    if unhooked := set(added) - set(moved.values()):
        found = run_git("grep", "--cached", "-lE", SIMILAR, "--", *unhooked, cwd=tree).stdout.decode().splitlines()
        if found:
            yield f"new files with similar code, which no patch changes: {len(found)}"
            yield from (f"    {path}" for path in found)


def progress(text: str) -> None:
    """Print a line while the port runs, on stderr: stdout is the report's."""
    print(text, file=sys.stderr, flush=True)


def destination(to: str, stack: Stack, project: Path, scratch: Path) -> tuple[str, Path | Fork, Release | None]:
    """Return the name of the release or folder ``to``, a scratch copy of it, and the entry of a new release.

    A folder that is not a release is named by its version and content, in PEP 440's form: 0.10.0.dev+1a2b3c4d. If it
    is a git checkout, its fork is returned instead of a copy.
    """
    framework = stack.release.framework
    releases, entry = load_releases(project, framework), None
    if to in releases:
        name, root = to, unpacked_wheel(to, scratch / "wheel", framework)
    elif Path(to).is_dir():
        source = find_target(Path(os.path.abspath(to)), framework)
        blobs = source.blobs()
        if added := [path for path in stack.added if path in blobs]:
            unapply = f"make unapply-patches {source.variable}, or where they are commits, check out one before them"
            raise Refused(f"{to} contains {added[0]} already; remove the patches first: {unapply}")
        if not source.version:
            raise Refused(f"{to}: {framework.version_file} contains no version; give a checkout or a release")
        fork = find_fork(source)
        tree = package_tree_id(fork.blobs if fork else blobs)
        same = [release.name for release in releases.values() if release.tree_before == tree]
        name = same[0] if same else f"{source.version}+{tree[:8]}"
        root = fork if fork and not same else scratch / "wheel"
        if root is not fork:
            for path in package_files(source.root, framework):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source.root / path, root / path)
    elif re.fullmatch(r"\d+(\.\w+)+", to):
        archive = download(to, framework)
        name, root = to, unpack(archive, scratch / "wheel")
        tree = package_tree_id(package_blobs(root, framework))
        entry = replace(stack.release, name=to, wheel_sha256=sha256(archive), tree_before=tree)
        entry = replace(entry, tree_after=tree, tree_after_fixes="", ported_from=stack.release.name)
    else:
        raise Refused(f"{to} is neither a release ({', '.join(releases)}, or a newer one on PyPI) nor a folder")
    if name == stack.release.name:
        raise Refused(f"{to} is {stack.release} itself: apply the patches to it")
    return name, root, entry


def find_fork(source: Target) -> Fork | None:
    """Return the fork that ``source`` is a checkout of; None if it is not the top of one."""
    root = source.root
    if not (root / ".git").exists():
        return None
    found = run_git("rev-parse", "--verify", "HEAD^{commit}", cwd=root)
    if found.returncode:
        reason = found.stderr.decode(errors="replace").partition("\n")[0]
        raise Refused(f"{root} is a git checkout without a commit, or another user's: {reason}")
    commit_id, package = found.stdout.decode().strip(), source.framework.name
    options = ("--porcelain", "--untracked-files=no", "--", package)
    if changed := git("--no-optional-locks", "status", *options, cwd=root).splitlines():
        raise Refused(f"{root} has uncommitted changes: {changed[0][3:]}; commit or stash them, then port again")
    date = git("log", "-1", "--format=%cI", commit_id, cwd=root).strip()
    return Fork(root, commit_id, date, blobs_of(root, commit_id, package))


def branch_fork(fork: Fork, branch: str, name: str, stack: Stack, scratch: Path) -> Path:
    """Clone the fork, as the remote ``origin``, into ``scratch``, and add the verbatim files on a new branch."""
    tree = scratch / "tree"
    git("clone", "--quiet", "--no-tags", "--no-checkout", str(fork.root), str(tree), cwd=scratch)
    git("checkout", "--quiet", "-b", branch, fork.commit_id, cwd=tree)
    commit_copied(stack, name, tree, fork.date)
    return tree
