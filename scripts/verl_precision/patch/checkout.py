"""Make a git tree of a release's stack: the wheel's package, the verbatim files, then one commit for each patch."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.files import write
from verl_precision.patch.git import DATE, git
from verl_precision.patch.git_objects import package_blobs, package_tree_id
from verl_precision.patch.releases import VERL, Framework, find_release
from verl_precision.patch.stack import Stack, load_stack
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.paths import REPO

# The tag names the release and marks the last commit that is not a patch.
BASE = "base/"


def checkout(name: str, folder: Path, project: Path = REPO, framework: Framework = VERL) -> list[str]:
    """Make ``folder`` a git tree with the stack of the release ``name`` as commits, and return what was done."""
    stack = load_stack(find_release(name, project, framework), project)
    with scratch_beside(folder) as (scratch, folder):
        os.replace(commit_stack(stack, scratch), folder)
    return [f"{stack.release} in {folder}: {len(stack.patches)} patches as commits after the tag {BASE}{name}"]


@contextlib.contextmanager
def scratch_beside(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a scratch folder beside ``folder``, in which to prepare it, and the absolute path of ``folder``."""
    folder = Path(os.path.abspath(folder))
    if folder.is_symlink() or folder.is_mount():
        raise Refused(f"{folder} is a link or a mount point, which cannot be replaced; give a folder in it")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise Refused(f"{folder} exists and is not an empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".checkout-") as scratch:
        yield Path(scratch), folder


def commit_stack(stack: Stack, scratch: Path) -> Path:
    """Make the git tree of a stack inside ``scratch`` and return its folder."""
    name, framework = stack.release.name, stack.release.framework
    root = unpacked_wheel(name, scratch / "wheel", framework)
    if (actual := package_tree_id(package_blobs(root, framework))) != stack.release.tree_before:
        expected = stack.release.tree_before
        raise Refused(f"{framework.name}/ in the wheel of {name} is tree {actual}; versions.toml records {expected}")
    return commit_patches(stack, commit_base(name, root, stack, scratch))


def commit_patches(stack: Stack, tree: Path) -> Path:
    """Commit the patches of a stack in a git tree, and return that."""
    for patch in stack.patches:
        git("apply", "--index", "--whitespace=nowarn", "-", cwd=tree, stdin=patch.text)
        commit(tree, patch.message)
    return tree


def commit_base(name: str, root: Path, stack: Stack, scratch: Path) -> Path:
    """Move the package from ``root`` into a new git tree inside ``scratch``, and commit the stack's verbatim files."""
    tree, package = scratch / "tree", stack.release.framework.name
    tree.mkdir()
    os.replace(root / package, tree / package)
    git("init", "--quiet", "--initial-branch=stack", cwd=tree)
    git("config", "user.name", "verl-precision", cwd=tree)  # to continue a cherry-pick without an identity
    git("config", "user.email", "", cwd=tree)
    git("config", "maintenance.auto", "false", cwd=tree)  # else each commit starts another process
    write(tree / ".git/info/exclude", b"__pycache__/\n")
    write(tree / ".git/info/attributes", b"*.py diff=python\n")  # hunk headers then name the function
    git("add", "--all", "--force", cwd=tree)
    commit(tree, f"{package} {name}")
    commit_copied(stack, name, tree)
    return tree


def commit_copied(stack: Stack, name: str, tree: Path, date: str = DATE) -> None:
    """Commit the stack's verbatim files in a git tree of ``name``, and tag the commit, which the patches follow."""
    for path, content in stack.added.items():
        write(tree / path, content)
    git("add", "--force", "--", *stack.added, cwd=tree)
    commit(tree, f"verl-precision: files of {stack.release}, stack {stack.id}, copied in verbatim", date)
    git("tag", BASE + name, cwd=tree)


def commit(tree: Path, message: str, date: str = DATE) -> None:
    """Commit the index with exactly this message."""
    git("commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "--file=-", cwd=tree, stdin=message, date=date)
