"""Carry a changed patch of a release to the other releases that have a patch of its name, by three-way merge.

The change is the difference between two states of the release: after the patch in git's HEAD, and after the patch as it
is now. git's rebase merges it into each other release's patch, puts the later patches on top, and stops at a conflict.
Nothing is written until every release was tried.
"""

import os
import shlex
from pathlib import Path
from typing import NamedTuple

from verl_precision.errors import Refused
from verl_precision.patch.commits import commit, commit_stack, prepare_export, scratch_beside, write_exports
from verl_precision.patch.git import git, run_git, unmerged
from verl_precision.patch.releases import VERL, Framework, Release, find_release, load_releases
from verl_precision.patch.stack import Patch, Stack, load_stack, make_stack
from verl_precision.paths import REPO

CHANGE = "change"  # the branch whose last commit is carried


class PatchChange(NamedTuple):
    """A patch in git's HEAD and now, and ``tree``, a git tree with the difference as the last commit of a branch."""

    old: Patch
    new: Patch
    tree: Path


def carry_patch(
    name: str, source: str, folder: Path, project: Path = REPO, framework: Framework = VERL
) -> tuple[list[str], bool]:
    """Carry the patch ``name`` of the release ``source`` and export the releases into which it merges.

    For each other release, ``folder`` contains a git tree to finish in. Return a report, a line each, and whether
    nothing is left to resolve.
    """
    name = f"{name.removesuffix('.patch')}.patch"
    release = find_release(source, project, framework)
    now, committed = load_stack(release, project), committed_stack(release, project)
    number = changed_patch(name, committed, now)
    stacks = [load_stack(each, project) for each in load_releases(project, framework).values() if each != release]
    stacks = [stack for stack in stacks if name in names(stack)]
    if not stacks:
        raise Refused(f"no release but {release} has {name}, so there is none to carry it to")
    lines, whole, trees = [], [], []
    with scratch_beside(folder) as (scratch, folder):
        change = commit_change(committed, now, number, scratch / "from")
        for stack in stacks:
            tree, stopped = merge_change(change, stack, scratch / stack.release.name)
            if not stopped:
                whole.append(tree)
                continue
            target = folder / stack.release.name
            trees.append((tree, target))
            lines += [f"{stack.release}: not exported; finish in {target}, stopped at {stopped}"]
            lines += ["    git status; edit; git add; git rebase --continue; then"]
            lines += [f"    python3 scripts/verl_precision export {target}"]
        prepared = [prepare_export(tree, project, remove=True) for tree in whole]  # what the change has made empty
        exported = write_exports(prepared, project) if prepared else []
        if change.old.message != change.new.message:
            other = [stack for stack in stacks if stack.patches[names(stack).index(name)].message != change.old.message]
            lines += [f"{stack.release}: its own message of {name} is kept; edit that by hand" for stack in other]
        for tree, target in trees:
            target.parent.mkdir(exist_ok=True)
            os.replace(tree, target)
    count = f"{name} of {release}: carried to {len(whole)} of {len(stacks)} releases"
    return [count, *exported, *lines], not trees


def names(stack: Stack) -> list[str]:
    return [patch.name for patch in stack.patches]


def committed_stack(release: Release, project: Path) -> Stack:
    """Return the release's patches in git's HEAD, without files to copy; raises Refused where git has none."""
    folder = (release.framework.home(project) / f"v{release.name}").relative_to(project).as_posix()
    if run_git("cat-file", "-e", f"HEAD:{folder}/series", cwd=project).returncode:
        raise Refused(f"git's HEAD of {project} has no {folder}/series to compare with; commit the patches first")
    series = git("show", f"HEAD:{folder}/series", cwd=project).split()
    patches = (Patch(each, git("show", f"HEAD:{folder}/{each}", cwd=project)) for each in series)
    return make_stack(release, tuple(patches), {})


def changed_patch(name: str, committed: Stack, now: Stack) -> int:
    """Return the position of the patch in both series; raises Refused where it is not the first one that changed."""
    for stack, where in ((now, "the series"), (committed, "git's HEAD")):
        if name not in names(stack):
            known = ", ".join(names(stack))
            raise Refused(f"PATCH={name}: {where} of {now.release} has no such patch, only {known}")
    number = names(now).index(name)
    if now.patches[number] == committed.patches[names(committed).index(name)]:
        steps = f"verl-precision checkout {now.release.name}, commit, export"
        raise Refused(f"PATCH={name}: is as in git's HEAD; change it first ({steps}), and carry it before you commit")
    if now.patches[:number] != committed.patches[: names(committed).index(name)]:
        raise Refused(f"PATCH={name}: a patch that precedes it changed too; carry and commit that first")
    return number


def commit_change(committed: Stack, now: Stack, number: int, scratch: Path) -> PatchChange:
    """Make, inside ``scratch``, a git tree whose branch ``change`` ends with the patch's change as a commit."""
    scratch.mkdir()
    old, new = committed.patches[number], now.patches[number]
    tree = commit_stack(make_stack(now.release, now.patches[:number], {}), scratch)
    git("checkout", "--quiet", "-b", CHANGE, cwd=tree)
    for patch in (old, new):  # the second commit, on the first, is the difference
        git("read-tree", "-u", "--reset", "stack", cwd=tree)
        git("apply", "--index", "--whitespace=nowarn", "-", cwd=tree, stdin=patch.text)
        commit(tree, patch.message)
    return PatchChange(old, new, tree)


def merge_change(change: PatchChange, stack: Stack, scratch: Path) -> tuple[Path, str]:
    """Make, inside ``scratch``, the git tree of a stack with the change merged into its patch of the name.

    Returns:
        its folder, and the patch and files at which git stopped; empty where it did not.
    """
    scratch.mkdir()
    tree, number = commit_stack(stack, scratch), names(stack).index(change.old.name)
    ids = git("rev-list", "--reverse", f"HEAD~{len(stack.patches) - number}..HEAD", cwd=tree).split()
    git("fetch", "--quiet", "--no-tags", str(change.tree), f"{CHANGE}:{CHANGE}", cwd=tree)
    todo = [f"pick {reworded(change, stack.patches[number], ids[0], tree)}", f"fixup {CHANGE}"]
    plan = tree / ".git/carry-todo"
    plan.write_text("\n".join([*todo, *(f"pick {each}" for each in ids[1:])]) + "\n")
    editor = f"sequence.editor=cp {shlex.quote(str(plan))}"
    done = run_git("-c", editor, "rebase", "--quiet", "--interactive", "--empty=drop", f"{ids[0]}~", cwd=tree)
    plan.unlink()
    if not done.returncode:
        return tree, ""
    if files := unmerged(tree):
        return tree, f"{git('log', '-1', '--format=%s', 'REBASE_HEAD', cwd=tree).strip()}: {', '.join(files)}"
    raise Refused(f"git rebase failed: {done.stderr.decode().strip()}")


def reworded(change: PatchChange, patch: Patch, commit_id: str, tree: Path) -> str:
    """Return the patch's commit, with the new message where its own is the old one."""
    if patch.message != change.old.message or change.old.message == change.new.message:
        return commit_id
    arguments = ("commit-tree", f"{commit_id}^{{tree}}", "-p", f"{commit_id}~")
    return git(*arguments, cwd=tree, stdin=change.new.message).strip()
