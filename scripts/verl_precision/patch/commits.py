"""Make a git tree of a release's stack, with a commit for each patch, and export its commits as patches again.

The tree contains the wheel's package, then the verbatim files, then the patches.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.files import replace_files, write
from verl_precision.format import first_three, slug
from verl_precision.patch.git import DATE, git, unfinished
from verl_precision.patch.git_objects import package_blobs, package_tree_id
from verl_precision.patch.releases import FRAMEWORKS, VERL, Framework, find_release, with_trees_after
from verl_precision.patch.stack import Patch, Stack, check_trailers, load_stack, make_stack, precision_patches
from verl_precision.patch.target import find_target
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.paths import REPO

# The tag names the release and marks the last commit that is not a patch.
BASE = "base/"

# As upstream has it: [modules] type: description
SUBJECT = re.compile(r"\[([a-z_]+)(?:, ?[a-z_]+)*\] (?:feat|fix|refactor|chore|test): (\S.*)")

# With less than one line of context, git would place an insertion only with an option that trusts line numbers.
# Each option that a user's configuration could change is given.
DIFF_OPTIONS = (
    *("--patch", "--unified=1", "--inter-hunk-context=0", "--full-index", "--no-renames", "--no-ext-diff"),
    *("--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/", "--diff-algorithm=histogram"),
    "--indent-heuristic",
)


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


def read_commits(tree: Path) -> tuple[Framework, str, tuple[Patch, ...]]:
    """Return the framework, the release and the commits, as patches, of a git tree made by checkout."""
    release = base_of(tree)
    base = BASE + release
    framework = find_target(tree, *FRAMEWORKS.values()).framework
    pristine = blobs_of(tree, f"{base}^")
    patches: dict[str, Patch] = {}
    for commit in git("log", "--reverse", "--format=%H %B%x00", f"{base}..HEAD", cwd=tree).split("\0")[:-1]:
        commit_id, _, message = commit.strip().partition(" ")
        subject = message.partition("\n")[0]
        changes = git("diff-tree", "--no-commit-id", "--name-status", "--no-renames", "-r", commit_id, cwd=tree)
        if not changes:
            continue
        for status, path in (line.split("\t") for line in changes.splitlines()):
            if path not in pristine or status != "M":
                only = f"a patch only changes files of the release; new files are in patches/{framework.name}/files"
                raise Refused(f"commit {subject!r} adds, removes or changes {path}; {only}")
        diff = git("diff-tree", "--no-commit-id", *DIFF_OPTIONS, commit_id, cwd=tree)
        if marker := re.search(r"^\+(?:<{7}|>{7}) ", diff, re.M):
            raise Refused(f"commit {subject!r} has a conflict marker, {marker[0][1:].strip()}; resolve the conflict")
        patch = Patch(file_name(subject), f"Subject: {message}\n---\n{diff}")
        check_trailers(patch)
        if patch.name in patches:
            raise Refused(f"two commits would both become {patch.name}")
        patches[patch.name] = patch
    return framework, release, tuple(patches.values())


def base_of(tree: Path) -> str:
    """Return the release of a git tree made by checkout; it must be clean and linear."""
    if not (tree / ".git").is_dir():
        raise Refused(f"{tree} is not a git tree made by checkout")
    tags = git("tag", "--list", f"{BASE}*", cwd=tree).split()
    if len(tags) != 1:
        raise Refused(f"{tree} has {len(tags)} tags {BASE}<release>; checkout creates exactly one")
    if begun := unfinished(tree):
        raise Refused(f"{tree} has a {begun} to finish: git -C {tree} {begun} --continue")
    if changed := git("status", "--porcelain", cwd=tree).splitlines():
        raise Refused(f"{tree} has uncommitted changes: {changed[0][3:]}")
    if git("rev-list", f"HEAD..{tags[0]}", cwd=tree) or git("rev-list", "--merges", f"{tags[0]}..HEAD", cwd=tree):
        raise Refused(f"{tree} must be a line of commits on top of {tags[0]}, without merges")
    return tags[0].removeprefix(BASE)


def blobs_of(tree: Path, revision: str, folder: str = ".") -> dict[str, str]:
    """Return the blob id of each file below ``folder`` in a revision, by path."""
    lines = git("ls-tree", "-r", revision, "--", folder, cwd=tree).splitlines()
    return {path: entry.split()[2] for entry, path in (line.split("\t") for line in lines)}


def file_name(subject: str) -> str:
    """Return the file name of a patch: its first area and the slug of what it does."""
    match = SUBJECT.fullmatch(subject)
    if not match:
        raise Refused(f"commit {subject!r} needs a subject like '[fsdp] feat: read the dtype'")
    name = slug(match[2].replace("'", ""))
    return f"{match[1]}-{name}.patch"


def export(tree: Path, project: Path = REPO, remove: bool = False) -> list[str]:
    """Write the commits of a git tree made by checkout into the project: all files, or none.

    Args:
        remove: delete the patches of the release that have no commit.

    Returns:
        what was written, a line each.

    Raises:
        Refused: a commit cannot be a patch, a re-export differs, or patches would be deleted without ``remove``.
    """
    tree = Path(os.path.abspath(tree))
    framework, name, patches = read_commits(tree)
    release, home = find_release(name, project, framework), framework.home(project)
    folder = home / f"v{name}"
    lost = sorted({path.name for path in folder.glob("*.patch")} - {patch.name for patch in patches})
    if lost and not remove:  # as after `git cherry-pick --abort` or a subject that was reworded
        cause = f"its export would delete {len(lost)} of the patches of {release}: {first_three(lost)}"
        raise Refused(f"{tree}: {cause}; restore their commits, or add --remove to delete them")
    with tempfile.TemporaryDirectory() as scratch:
        pristine = unpacked_wheel(name, Path(scratch), framework)
        trees_after = package_trees(package_blobs(pristine, framework), patches)
        check_re_export(make_stack(release, patches, {}), pristine)
    contents = {folder / patch.name: patch.text.encode() for patch in patches}
    contents[folder / "series"] = "".join(f"{patch.name}\n" for patch in patches).encode()
    contents |= {folder / name: None for name in lost}
    table = home / "versions.toml"
    contents[table] = with_trees_after(release, *trees_after, table.read_text()).encode()
    replace_files(contents, home)
    return [f"{release}: {len(patches)} patches in {folder}", *(f"deleted {name}" for name in lost)]


def package_trees(pristine: Mapping[str, str], patches: Sequence[Patch]) -> tuple[str, str]:
    """Return the package's tree id with the patches of ``precision``, and with all; without ``fixes`` that is empty."""
    trees, count = [], precision_patches(patches)
    for part in (patches[:count], patches):
        hooked = {path: after for patch in part for path, _, after in patch.blobs}
        trees.append(package_tree_id({**pristine, **hooked}))
    return trees[0], trees[1] if count < len(patches) else ""


def check_re_export(stack: Stack, root: Path) -> None:
    """Raise Refused if the stack of all patches, committed on the wheel in ``root`` and exported again, differs."""
    framework = stack.release.framework
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for path in {f"{framework.name}/__init__.py", *stack.before}:  # of all files git would take ten times as long
            write(scratch / path, (root / path).read_bytes())
        base = commit_base(stack.release.name, scratch, replace(stack, added={}), scratch)
        _, _, again = read_commits(commit_patches(stack, base))
    if differing := sorted({patch.name for patch in set(stack.patches) ^ set(again)}):
        raise Refused(f"a re-export would change {', '.join(differing)}")
