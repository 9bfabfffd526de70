"""Export the commits of a git tree made by checkout as patches, and check that a re-export gives the same."""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from verl_precision.errors import Refused
from verl_precision.files import replace_files, write
from verl_precision.format import first_three, slug
from verl_precision.patch.checkout import BASE, commit_base, commit_patches
from verl_precision.patch.git import git, read_blob, unfinished
from verl_precision.patch.git_objects import package_blobs, package_tree_id
from verl_precision.patch.releases import FRAMEWORKS, Framework, Release, find_release, with_trees_after
from verl_precision.patch.stack import Patch, Stack, in_fixes, make_stack, precision_patches, trailers, verbatim_files
from verl_precision.patch.target import find_target
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.paths import REPO

# As upstream has it: [modules] type: description
SUBJECT = re.compile(r"\[([a-z_]+)(?:, ?[a-z_]+)*\] (?:feat|fix|refactor|chore|test): (\S.*)")

# With less than one line of context, git would place an insertion only with an option that trusts line numbers.
# Each option that a user's configuration could change is given.
DIFF_OPTIONS = (
    *("--patch", "--unified=1", "--inter-hunk-context=0", "--full-index", "--no-renames", "--no-ext-diff"),
    *("--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/", "--diff-algorithm=histogram"),
    "--indent-heuristic",
)


class Export(NamedTuple):
    """The content of a git tree made by checkout.

    Args:
        verbatim: content at the base and at HEAD, by path, of each verbatim file that the commits change; None if it
            is absent.
        fixes: the files that commits of ``fixes`` add.
    """

    framework: Framework
    release: str
    patches: tuple[Patch, ...]
    verbatim: dict[str, list[bytes | None]]
    fixes: set[str]


def read_commits(tree: Path) -> Export:
    """Read a git tree made by checkout; raises Refused if it is not clean and linear, or a commit cannot be a patch."""
    release = base_of(tree)
    base = BASE + release
    framework = find_target(tree, *FRAMEWORKS.values()).framework
    pristine = blobs_of(tree, f"{base}^")
    patches: dict[str, Patch] = {}
    added: set[str] = set()  # by commits of the series fixes
    for commit in git("log", "--reverse", "--format=%H %B%x00", f"{base}..HEAD", cwd=tree).split("\0")[:-1]:
        commit_id, _, message = commit.strip().partition(" ")
        subject = message.partition("\n")[0]
        changes = git("diff-tree", "--no-commit-id", "--name-status", "--no-renames", "-r", commit_id, cwd=tree)
        statuses = {path: status for status, path in (line.split("\t") for line in changes.splitlines())}
        if outside := [path for path in statuses if not path.startswith(f"{framework.name}/")]:
            raise Refused(f"commit {subject!r} changes {outside[0]}, which is not in {framework.name}/")
        paths = [path for path in statuses if path in pristine]
        if in_fixes(message):
            added |= {path for path in statuses if statuses[path] == "A"}
        if not paths:
            continue
        if removed := [path for path in paths if statuses[path] != "M"]:
            raise Refused(f"commit {subject!r} removes {removed[0]}; a patch may only change files of {framework.name}")
        diff = git("diff-tree", "--no-commit-id", *DIFF_OPTIONS, commit_id, "--", *paths, cwd=tree)
        if marker := re.search(r"^\+(?:<{7}|>{7}) ", diff, re.M):
            raise Refused(f"commit {subject!r} has a conflict marker, {marker[0][1:].strip()}; resolve the conflict")
        patch = Patch(file_name(subject), f"Subject: {message}\n---\n{diff}")
        trailers(patch)
        if patch.name in patches:
            raise Refused(f"two commits would both become {patch.name}")
        patches[patch.name] = patch
    return Export(framework, release, tuple(patches.values()), verbatim_edits(tree, base, pristine), added)


def base_of(tree: Path) -> str:
    """Return the release of a git tree made by checkout, and refuse one that is unfinished or not linear."""
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


def verbatim_edits(tree: Path, base: str, pristine: dict[str, str]) -> dict[str, list[bytes | None]]:
    """Return content at the base and at HEAD of each file that the release lacks and the commits changed."""
    sides = old, new = blobs_of(tree, base), blobs_of(tree, "HEAD")
    changed = [path for path in {**old, **new} if path not in pristine and old.get(path) != new.get(path)]
    return {path: [read_blob(side[path], tree) if path in side else None for side in sides] for path in changed}


def file_name(subject: str) -> str:
    """Return the file name of a patch: its first area and the slug of what it does."""
    match = SUBJECT.fullmatch(subject)
    if not match:
        raise Refused(f"commit {subject!r} needs a subject like '[fsdp] feat: read the dtype'")
    name = slug(match[2].replace("'", ""))
    return f"{match[1]}-{name}.patch"


class PreparedExport(NamedTuple):
    """A checked export: new contents of the project's files, None for those to delete, and a line on each change."""

    release: Release
    trees_after: tuple[str, str]
    contents: Mapping[Path, bytes | None]
    lines: list[str]


def export(tree: Path, project: Path = REPO, remove: bool = False) -> list[str]:
    """Write the commits of a git tree made by checkout into the project, with the verbatim files that they changed.

    Args:
        remove: delete the patches of the release that have no commit.

    Returns:
        what was written, a line each.

    Raises:
        Refused: a commit cannot be a patch, a re-export differs, patches would be deleted without ``remove``, or the
            project's own verbatim files have changed since the checkout; nothing was written.
    """
    return write_exports([prepare_export(tree, project, remove)], project)


def prepare_export(tree: Path, project: Path, remove: bool = False) -> PreparedExport:
    """Check the commits of a git tree for ``export``, with its arguments and errors, and write nothing."""
    tree = Path(os.path.abspath(tree))
    commits = read_commits(tree)
    release = find_release(commits.release, project, commits.framework)
    edits = {
        project_file(path, project, commits.framework, path in commits.fixes): contents
        for path, contents in commits.verbatim.items()
    }
    for path, contents in edits.items():
        if (path.read_bytes() if path.exists() else None) not in contents:
            raise Refused(f"{path} changed since the checkout, and the commits change it too; merge the two changes")
    folder = commits.framework.home(project) / f"v{release.name}"
    lost = sorted({path.name for path in folder.glob("*.patch")} - {patch.name for patch in commits.patches})
    if lost and not remove:  # as after `git cherry-pick --abort` or a subject that was reworded
        cause = f"its export would delete {len(lost)} of the patches of {release}: {first_three(lost)}"
        raise Refused(f"{tree}: {cause}; restore their commits, or add --remove to delete them")
    with tempfile.TemporaryDirectory() as scratch:
        pristine = unpacked_wheel(release.name, Path(scratch), commits.framework)
        trees_after = package_trees(package_blobs(pristine, commits.framework), commits.patches)
        check_re_export(make_stack(release, commits.patches, {}), pristine)
    contents = {folder / patch.name: patch.text.encode() for patch in commits.patches}
    contents[folder / "series"] = "".join(f"{patch.name}\n" for patch in commits.patches).encode()
    contents |= {path: after for path, (_, after) in edits.items()} | {folder / name: None for name in lost}
    lines = [f"{release}: {len(commits.patches)} patches in {folder}", *(f"deleted {name}" for name in lost)]
    lines += [f"wrote {path}" for path in edits]
    return PreparedExport(release, trees_after, contents, lines)


def write_exports(exports: Sequence[PreparedExport], project: Path) -> list[str]:
    """Write exports of one framework, all of them or none, and return what was written, a line each."""
    home = exports[0].release.framework.home(project)
    text, contents = (home / "versions.toml").read_text(), {}
    for each in exports:
        text = with_trees_after(each.release, *each.trees_after, text)
        contents |= each.contents
    replace_files(contents | {home / "versions.toml": text.encode()}, home)
    return [line for each in exports for line in each.lines]


def project_file(path: str, project: Path, framework: Framework, fixes: bool = False) -> Path:
    """Return the project's file that apply copies to ``path``; ``fixes``: a new file belongs to that series."""
    known = verbatim_files(project, framework)
    if path in known:
        return known[path]
    if Path(path).parent.as_posix() == framework.overlays:
        return project / "configs/precision" / Path(path).name
    return framework.home(project) / ("fixes" if fixes else "files") / path


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
        again = read_commits(commit_patches(stack, base))
    if differing := sorted({patch.name for patch in set(stack.patches) ^ set(again.patches)}):
        raise Refused(f"a re-export would change {', '.join(differing)}")
