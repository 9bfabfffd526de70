"""Make a git tree of a release's stack: the wheel's package, the verbatim files, then one commit for each patch."""

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from lib.errors import Refused
from lib.files import write
from lib.patches.git import DATE, git
from lib.patches.git_objects import package_blobs, package_tree_id
from lib.patches.releases import VERL, Framework, find_release
from lib.patches.stack import Patch, Stack, load_stack
from lib.patches.wheels import unpacked_wheel
from lib.paths import REPO

# The tag names the release and marks the last commit that is not a patch.
BASE = "base/"
SERIES = "precision.series"  # key of the git tree's configuration: digests of the series that it was made of


def checkout(name: str, folder: Path, project: Path = REPO, framework: Framework = VERL) -> list[str]:
    """Make ``folder`` a git tree with the stack of the release ``name`` as commits, and return what was done."""
    stack = load_stack(find_release(name, project, framework), project)
    with scratch_beside(folder) as (scratch, folder):
        os.replace(commit_stack(stack, scratch), folder)
    return [f"{stack.release} in {folder}: {len(stack.patches)} patches as commits after the tag {BASE}{name}"]


@contextlib.contextmanager
def scratch_beside(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a scratch folder beside ``folder``, to be renamed to it, and the absolute path of ``folder``.

    Raises:
        Refused: ``folder`` exists and is not an empty folder.
    """
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
    tree = commit_patches(stack, commit_base(name, root, stack.added, scratch, framework))
    git("config", SERIES, series_digests(series_files(stack.patches)), cwd=tree)
    return tree


def series_files(patches: Iterable[Patch]) -> dict[str, bytes]:
    """Return the content of each file of a series, by its name."""
    texts = {patch.name: patch.text for patch in patches}
    texts["series"] = "".join(f"{name}\n" for name in texts)
    return {name: text.encode() for name, text in texts.items()}


def series_digests(files: Mapping[str, bytes]) -> str:
    """Return a digest of each file of a series with its name, in one line."""
    return " ".join(sorted(sha256(f"{name}\0".encode() + content).hexdigest()[:16] for name, content in files.items()))


def commit_patches(stack: Stack, tree: Path) -> Path:
    """Commit the patches of a stack in the git tree ``tree``, and return that."""
    for patch in stack.patches:
        git("apply", "--index", "--whitespace=nowarn", "-", cwd=tree, stdin=patch.text)
        commit(tree, patch.message)
    return tree


def commit_base(name: str, root: Path, added: Mapping[str, bytes], scratch: Path, framework: Framework = VERL) -> Path:
    """Move the package from ``root`` into a new git tree inside ``scratch``, add the verbatim files, and tag that."""
    tree = scratch / "tree"
    tree.mkdir()
    os.replace(root / framework.name, tree / framework.name)
    git("init", "--quiet", "--initial-branch=stack", cwd=tree)
    git("config", "user.name", "verl-precision", cwd=tree)  # whoever continues a cherry-pick needs no identity
    git("config", "user.email", "", cwd=tree)
    write(tree / ".git/info/exclude", b"__pycache__/\n")
    write(tree / ".git/info/attributes", b"*.py diff=python\n")  # hunk headers then name the function
    git("add", "--all", "--force", cwd=tree)
    commit(tree, f"{framework.name} {name}")
    for path, content in added.items():
        write(tree / path, content)
    git("add", "--all", "--force", cwd=tree)
    commit(tree, "verl-precision: the files that are copied in verbatim")
    git("tag", BASE + name, cwd=tree)
    return tree


def commit(tree: Path, message: str, date: str = DATE) -> None:
    """Commit the index with exactly this message."""
    git("commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "--file=-", cwd=tree, stdin=message, date=date)
