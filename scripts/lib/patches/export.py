"""The series of one release as git commits: check it out, export it, and check that both are true to the wheel."""

import compileall
import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lib.errors import Refused
from lib.patches.releases import (
    FRAMEWORKS,
    VERL,
    Framework,
    blob_id,
    find_release,
    package_blobs,
    package_tree_id,
    record_tree_after,
    unpacked_wheel,
)
from lib.patches.stack import (
    Patch,
    Stack,
    apply,
    find_target,
    git,
    load_stack,
    make_stack,
    status,
    trailers,
    unapply,
    write,
)
from lib.paths import REPO

# The tag names the release and marks the last commit that is not a patch.
BASE = "base/"

# What git leaves in .git while commits are still to come.
UNFINISHED = {"cherry-pick": "sequencer", "rebase": "rebase-merge"}

# As upstream has it: [modules] type: description
SUBJECT = re.compile(r"\[([a-z_]+)(?:, ?[a-z_]+)*\] (?:feat|fix|refactor|chore|test): (\S.*)")

# One line of context is the least with which git places an insertion without being told to trust line numbers.
# Everything that a user's configuration could change is said.
DIFF_OPTIONS = (
    *("--patch", "--unified=1", "--inter-hunk-context=0", "--full-index", "--no-renames", "--no-ext-diff"),
    *("--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/", "--diff-algorithm=histogram"),
    "--indent-heuristic",
)


def checkout(name: str, folder: Path, project: Path = REPO, framework: Framework = VERL) -> list[str]:
    """Make ``folder`` a git tree: the wheel's package, the files copied in verbatim, then a commit for each patch."""
    stack = load_stack(find_release(name, project, framework), project)
    with scratch_beside(folder) as (scratch, folder):
        os.replace(commit_stack(stack, scratch), folder)
    return [f"{stack.release} in {folder}: {len(stack.patches)} patches as commits after the tag {BASE}{name}"]


@contextlib.contextmanager
def scratch_beside(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Give a folder to make ``folder`` in, and its absolute path; raises Refused where it exists and is not empty."""
    folder = Path(os.path.abspath(folder))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise Refused(f"{folder} exists and is not an empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".checkout-") as scratch:
        yield Path(scratch), folder


def commit_stack(stack: Stack, scratch: Path) -> Path:
    """Build the git tree of a stack inside ``scratch`` and return its folder."""
    name, framework = stack.release.name, stack.release.framework
    root = unpacked_wheel(name, scratch / "wheel", framework)
    if (found := package_tree_id(package_blobs(root, framework))) != stack.release.tree_before:
        raise Refused(f"{framework.name}/ in the wheel of {name} is tree {found}; versions.toml has another")
    return commit_patches(stack, commit_base(name, root, stack.added, scratch, framework))


def commit_patches(stack: Stack, tree: Path) -> Path:
    for patch in stack.patches:
        git("apply", "--index", "--whitespace=nowarn", "-", cwd=tree, stdin=patch.text)
        commit(tree, patch.message)
    return tree


def commit_base(name: str, root: Path, added: Mapping[str, bytes], scratch: Path, framework: Framework = VERL) -> Path:
    """Move the package from ``root`` into a new git tree inside ``scratch``, with the verbatim files, and tag that."""
    tree = scratch / "tree"
    tree.mkdir()
    os.replace(root / framework.name, tree / framework.name)
    git("init", "--quiet", "--initial-branch=stack", cwd=tree)
    git("config", "user.name", "verl-precision", cwd=tree)  # who carries commits on needs no identity of their own
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


def commit(tree: Path, message: str) -> None:
    git("commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "--file=-", cwd=tree, stdin=message)


@dataclass(frozen=True)
class Export:
    """What a git tree holds: patches in order, verbatim files that differ from the base (before, after), tree id."""

    framework: Framework
    release: str
    patches: tuple[Patch, ...]
    verbatim: dict[str, tuple[bytes | None, bytes | None]]
    tree_after: str


def read_commits(tree: Path) -> Export:
    """Read a git tree made by checkout; raises Refused, naming the commit, for what cannot be a patch."""
    release = base_of(tree)
    base = BASE + release
    framework = find_target(tree, *FRAMEWORKS.values()).framework
    pristine = blobs_of(tree, f"{base}^")
    hooked = dict(pristine)
    patches: dict[str, Patch] = {}
    for commit_id in git("rev-list", "--reverse", f"{base}..HEAD", cwd=tree).split():
        message = git("show", "--no-patch", "--format=%B", commit_id, cwd=tree).strip()
        subject = message.partition("\n")[0]
        changes = git("diff-tree", "--no-commit-id", "--name-status", "--no-renames", "-r", commit_id, cwd=tree)
        statuses = {path: status for status, path in (line.split("\t") for line in changes.splitlines())}
        if outside := [path for path in statuses if not path.startswith(f"{framework.name}/")]:
            raise Refused(f"commit {subject!r} changes {outside[0]}, which is not in {framework.name}/")
        paths = [path for path in statuses if path in pristine]
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
            raise Refused(f"two commits would both be {patch.name}")
        patches[patch.name] = patch
        hooked |= {path: after for path, _, after in patch.blobs}
    verbatim = verbatim_edits(tree, base, pristine)
    return Export(framework, release, tuple(patches.values()), verbatim, package_tree_id(hooked))


def base_of(tree: Path) -> str:
    """Return the release of a clean, linear git tree made by checkout; raises Refused for any other."""
    if not (tree / ".git").is_dir():
        raise Refused(f"{tree} is not a git tree made by checkout")
    tags = git("tag", "--list", f"{BASE}*", cwd=tree).split()
    if len(tags) != 1:
        raise Refused(f"{tree} has {len(tags)} tags {BASE}<release> where checkout leaves one")
    if begun := [step for step, state in UNFINISHED.items() if (tree / ".git" / state).exists()]:
        raise Refused(f"{tree} has a {begun[0]} to finish: git -C {tree} {begun[0]} --continue")
    if changed := git("status", "--porcelain", cwd=tree).splitlines():
        raise Refused(f"{tree} has uncommitted changes: {changed[0][3:]}")
    if git("rev-list", f"HEAD..{tags[0]}", cwd=tree) or git("rev-list", "--merges", f"{tags[0]}..HEAD", cwd=tree):
        raise Refused(f"{tree} must be a line of commits on top of {tags[0]}, without merges")
    return tags[0].removeprefix(BASE)


def blobs_of(tree: Path, revision: str) -> dict[str, str]:
    lines = git("ls-tree", "-r", revision, cwd=tree).splitlines()
    return {path: entry.split()[2] for entry, path in (line.split("\t") for line in lines)}


def verbatim_edits(tree: Path, base: str, pristine: dict[str, str]) -> dict[str, tuple[bytes | None, bytes | None]]:
    """Return content at the base and at HEAD of each file that the release lacks and that the commits changed."""
    old, new = blobs_of(tree, base), blobs_of(tree, "HEAD")
    changed = [path for path in {**old, **new} if path not in pristine and old.get(path) != new.get(path)]

    def content(blob: str | None) -> bytes | None:
        return git("cat-file", "blob", blob, cwd=tree).encode() if blob else None

    return {path: (content(old.get(path)), content(new.get(path))) for path in changed}


def file_name(subject: str) -> str:
    """Return the file name of a patch: its first area and the slug of what it does."""
    match = SUBJECT.fullmatch(subject)
    if not match:
        raise Refused(f"commit {subject!r} needs a subject like '[fsdp] feat: read the dtype'")
    slug = re.sub(r"[^a-z0-9]+", "-", match[2].lower().replace("'", "")).strip("-")
    return f"{match[1]}-{slug}.patch"


def export(tree: Path, project: Path = REPO) -> list[str]:
    """Write the commits of a git tree made by checkout back into the project, once a re-export gives the same again.

    Files copied in verbatim that the commits changed are written back too, unless the project's own have changed since
    the checkout: then Refused is raised and nothing is written.
    """
    tree = Path(os.path.abspath(tree))
    found = read_commits(tree)
    release = find_release(found.release, project, found.framework)
    edits = {project_file(path, project, found.framework): contents for path, contents in found.verbatim.items()}
    for path, contents in edits.items():
        if (path.read_bytes() if path.exists() else None) not in contents:
            raise Refused(f"{path} changed since the checkout, and the commits change it too; bring the two together")
    with tempfile.TemporaryDirectory() as scratch:
        pristine = unpacked_wheel(release.name, Path(scratch), found.framework)
        check_re_export(make_stack(release, found.patches, {}), pristine, found.tree_after)
    home = found.framework.home(project)
    folder = home / f"v{release.name}"
    with tempfile.TemporaryDirectory(dir=home, prefix=".export-") as scratch:
        new = Path(scratch, "new")
        write(new / "series", "".join(f"{patch.name}\n" for patch in found.patches).encode())
        for patch in found.patches:
            write(new / patch.name, patch.text.encode())
        if folder.exists():
            os.replace(folder, Path(scratch, "old"))
        os.replace(new, folder)
    record_tree_after(release, found.tree_after, home / "versions.toml")
    for path, (_, after) in edits.items():
        path.unlink(missing_ok=True) if after is None else write(path, after)
    return [f"{release}: {len(found.patches)} patches in {folder}", *(f"wrote {path}" for path in edits)]


def project_file(path: str, project: Path, framework: Framework) -> Path:
    """Return where the project keeps the file that apply copies to ``path``."""
    if Path(path).parent.as_posix() == framework.overlays:
        return project / "configs/precision" / Path(path).name
    return framework.home(project) / "files" / path


def check_re_export(stack: Stack, root: Path, tree_after: str) -> None:
    """Raise Refused where the stack, committed on the wheel in ``root`` and exported once more, is not what it was."""
    framework = stack.release.framework
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for path in {f"{framework.name}/__init__.py", *stack.before}:  # of all files git would take ten times as long
            write(scratch / path, (root / path).read_bytes())
        base = commit_base(stack.release.name, scratch, {}, scratch, framework)
        again = read_commits(commit_patches(stack, base))
    if differing := sorted({patch.name for patch in set(stack.patches) ^ set(again.patches)}):
        raise Refused(f"export would write {', '.join(differing)} differently")
    if (found := package_tree_id({**package_blobs(root, framework), **stack.after})) != tree_after:
        raise Refused(f"the series makes tree {found}, versions.toml has {tree_after}; checkout and export")


def check(name: str, project: Path = REPO, framework: Framework = VERL) -> str:
    """Try the stack of a release on its wheel and return what was seen; raises Refused at the first fault.

    The headers are complete; the wheel is the known one; apply makes the tree it should, and every file in it compiles;
    unapply gives back the wheel, byte for byte; the patches are what export writes.
    """
    release = find_release(name, project, framework)
    stack = load_stack(release, project)
    for patch in stack.patches:
        trailers(patch)
    with tempfile.TemporaryDirectory() as scratch:
        root = unpacked_wheel(name, Path(scratch), framework)
        before, blobs = contents(root), package_blobs(root, framework)
        apply(root, project, framework)
        found = status(root, project, framework)
        if found.state != "patched" or not found.exact:
            raise Refused(f"{release} is {found.state} after apply: {found.detail}")
        added = {path: blob_id(content) for path, content in stack.added.items()}
        if package_blobs(root, framework) != {**blobs, **stack.after, **added}:
            raise Refused(f"apply on {release} changes other files than the stack names")
        for path in [*stack.after, *added]:
            if path.endswith(".py") and not compileall.compile_file(root / path, quiet=2):
                raise Refused(f"{path} of {release} does not compile after apply")
        unapply(root, project, framework)
        if contents(root) != before:
            raise Refused(f"unapply does not give back the wheel of {release}")
        check_re_export(stack, root, release.tree_after)
    return f"{len(stack.patches)} patches, {len(stack.after)} files hooked, {len(added)} copied"


def contents(root: Path) -> dict[Path, bytes | None]:
    """Return the bytes of each file below ``root``, None for a folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in root.rglob("*")}
