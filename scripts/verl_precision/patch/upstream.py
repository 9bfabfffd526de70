"""Split the stack into branches of upstream verl, as planned in patches/upstream/branches.toml.

There are two lines of commits. The first has a commit for each patch that a branch picks hunks from. It is made on the
release of the series, where every hunk fits, and cherry-picked onto the clone's main, so a conflict is resolved with
ordinary git. The second has one commit per branch: verl's files as in the branch's last commit of the first line, the
files of verl/utils/precision that they need, tests, docs and the generated configs.

Both are made in a separate clone, which borrows the objects of the user's clone. That gets only the finished branches.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.files import write
from verl_precision.patch.commits import BASE, commit, commit_stack, scratch_beside
from verl_precision.patch.git import cherry_pick, git, run_git, unfinished, unmerged
from verl_precision.patch.git_objects import blob_id
from verl_precision.patch.hunks import hunks
from verl_precision.patch.precision_module import PACKAGE
from verl_precision.patch.releases import find_release
from verl_precision.patch.stack import Patch, Stack, files_below, load_stack
from verl_precision.paths import REPO

PREFIX = "precision/"
PAGE, INDEX = "advance/precision.md", "docs/index.rst"
GENERATE = "scripts/generate_trainer_config.sh"
CONFIGS = "verl/trainer/config"
LEAVE_OUT = "leave-out.patch"

# The files of the clone's main that are used here, except those that the stack hooks.
NEEDED = ("verl/__init__.py", GENERATE, INDEX, ".pre-commit-config.yaml")

# In the folder: the first line of commits, its base, the main that it is carried to, and the carried line.
LINE, START, ONTO, CARRIED = (f"refs/{name}" for name in ("line/is", "line/from", "line/to", "heads/carried"))
PLAN = "precision.plan"  # a key of its git configuration


@dataclass(frozen=True)
class Pick:
    """A patch of the series and the numbers of its hunks by path; without paths all, without numbers all of a file."""

    patch: str
    hunks: Mapping[str, tuple[int, ...]]

    def takes(self, path: str, number: int) -> bool:
        return not self.hunks or (path in self.hunks and number in (self.hunks[path] or (number,)))


@dataclass(frozen=True)
class Branch:
    """A branch, with its pull request's title; ``files`` are the stack's verbatim files that it adds or changes."""

    slug: str
    title: str
    picks: tuple[Pick, ...]
    files: tuple[str, ...]
    folder: Path

    @property
    def name(self) -> str:
        return PREFIX + self.slug

    @property
    def own_files(self) -> dict[str, bytes]:
        """Tests, docs and the package's ``__init__.py`` by path; the docs' page has only the branch's section."""
        return {path: file.read_bytes() for path, file in files_below(self.folder / "files").items()}


@dataclass(frozen=True)
class BranchPlan:
    """branches.toml."""

    stack: Stack  # is split
    branches: tuple[Branch, ...]  # in order
    stay: Mapping[str, str]  # patches in no branch, and why
    replace: list[list[str]]  # texts of the files copied in, and their replacements upstream
    id: str  # of the patches; a conflict that was resolved under another id was in other patches


def load_plan() -> BranchPlan:
    """Read patches/upstream/branches.toml."""
    import tomllib  # 3.11: --help runs on 3.10

    home = REPO / "patches/upstream"
    text = (home / "branches.toml").read_text()
    content = tomllib.loads(text)
    branches = []
    for entry in content["branch"]:
        slug, picks = entry["slug"], tuple(map(read_pick, entry["picks"]))
        branches.append(Branch(slug, entry["title"], picks, tuple(entry.get("files", ())), home / slug))
    stack = load_stack(find_release(content["release"]))
    parts = [stack.id, text, *(path.read_text() for path in sorted(home.rglob("*.patch")))]
    return BranchPlan(stack, tuple(branches), content["stay"], content["replace"], blob_id("\0".join(parts).encode()))


def read_pick(text: str) -> Pick:
    """Read ``patch [path[#number,number]] …``."""
    patch, *paths = text.split()
    hunks_by_path = {}
    for each in paths:
        path, _, numbers = each.partition("#")
        hunks_by_path[path] = tuple(map(int, numbers.split(","))) if numbers else ()
    return Pick(f"{patch}.patch", hunks_by_path)


# --- the first line: the series on its release, picked ---------------------------------------------------------------


def pick_line(plan: BranchPlan, scratch: Path) -> Path:
    """Make, inside ``scratch``, a git tree of the release with a commit for each patch that a branch picks from.

    These commits are the branch ``line``, and the release is the tag ``start``.
    """
    patches = {patch.name: patch for patch in plan.stack.patches}
    tree = commit_stack(plan.stack, scratch)
    git("checkout", "--quiet", "-b", "line", f"{BASE}{plan.stack.release.name}^", cwd=tree)
    git("tag", "start", cwd=tree)
    for branch in plan.branches:
        for pick in branch.picks:
            pick_hunks(branch, pick, patches[pick.patch], tree)
            commit(tree, f"{branch.slug}: {pick.patch}\n\nBranch: {branch.slug}\n")
        adapt = branch.folder / "adapt.patch"
        if adapt.exists():
            git("apply", "--index", "-", cwd=tree, stdin=adapt.read_text())
            commit(tree, f"{branch.slug}: {adapt.name}\n\nBranch: {branch.slug}\n")
    return tree


def pick_hunks(branch: Branch, pick: Pick, patch: Patch, tree: Path) -> None:
    """Merge the hunks into the files of ``tree``; raises Refused where one needs another that no branch has picked."""
    for path, before, after in patch.blobs:
        picked = [hunk for number, (_, hunk) in enumerate(hunks(patch, path), start=1) if pick.takes(path, number)]
        header = f"diff --git a/{path} b/{path}\nindex {before}..{after} 100644\n--- a/{path}\n+++ b/{path}\n"
        if picked and run_git("apply", "--3way", "-", cwd=tree, stdin=header + "".join(picked)).returncode:
            raise Refused(
                f"branches.toml: {branch.slug} cannot take these hunks of {path} of {patch.name} without those that it "
                "leaves out: leave out more, and add their replacement to adapt.patch"
            )


# --- the clone -------------------------------------------------------------------------------------------------------


def check_clone(verl: Path, plan: BranchPlan) -> None:
    """Raise Refused where the branches cannot be made from this clone, or their names are taken; changes nothing."""
    if not (verl / ".git").is_dir():
        raise Refused(f"VERL={verl} is not a git clone; give a clone of verl")
    if (verl / ".git/shallow").exists():
        raise Refused(f"VERL={verl} is a shallow clone, whose branches cannot be pushed: git fetch --unshallow")
    heads = git("for-each-ref", "--format=%(refname:lstrip=2)", "refs/heads/", cwd=verl).split()
    if "main" not in heads:
        raise Refused(f"VERL={verl} has no branch main, on which the branches are based")
    there = git("ls-tree", "-r", "--name-only", "refs/heads/main", cwd=verl).splitlines()
    if lacking := [path for path in NEEDED if path not in there]:
        raise Refused(f"VERL={verl} is not a clone of verl: its main has no {lacking[0]}")
    if PACKAGE in there:
        raise Refused(f"VERL={verl} has {PACKAGE} in its main already; give a clone without the stack in its main")
    if changed := git("--no-optional-locks", "status", "--porcelain", cwd=verl).splitlines():
        raise Refused(f"VERL={verl} has uncommitted changes: {changed[0][3:]}; commit, stash or remove them")
    if taken := [name for name in (PREFIX.rstrip("/"), *(branch.name for branch in plan.branches)) if name in heads]:
        raise Refused(f"VERL={verl} has these branches already; delete them: git branch -D {' '.join(taken)}")


def author(verl: Path) -> tuple[str, str]:
    """Return name and e-mail that git has for who submits the commits; raises Refused where it has none."""
    command = ["git", "-c", "user.useConfigOnly=true", "var", "GIT_AUTHOR_IDENT"]
    ident = subprocess.run(command, cwd=verl, capture_output=True, text=True)
    if ident.returncode:
        raise Refused(f"git has no author for the commits; set one: git -C {verl} config user.name NAME; user.email")
    return re.fullmatch(r"(.*) <(.*)> \S+ \S+", ident.stdout.strip()).groups()


def start(verl: Path, folder: Path, plan: BranchPlan) -> list[str]:
    """Make ``folder`` a clone with the first line of commits on top of main; return what to do about conflicts."""
    name, email = author(verl)
    with scratch_beside(folder) as (scratch, folder):
        line = pick_line(plan, scratch)
        tree = scratch / "clone"
        options = ("--quiet", "--shared", "--no-tags", "--single-branch", "--branch=main")
        git("clone", *options, str(verl.resolve()), str(tree), cwd=scratch)
        for key, value in {"user.name": name, "user.email": email, PLAN: plan.id}.items():
            git("config", key, value, cwd=tree)
        git("fetch", "--quiet", "--no-tags", str(line), f"line:{LINE}", f"refs/tags/start:{START}", cwd=tree)
        git("update-ref", ONTO, "HEAD", cwd=tree)
        git("checkout", "--quiet", "-b", CARRIED.removeprefix("refs/heads/"), cwd=tree)
        done = cherry_pick(f"{START}..{LINE}", tree)
        os.replace(tree, folder)
    if done:
        return []
    patch = git("log", "-1", "--format=%s", "CHERRY_PICK_HEAD", cwd=folder).strip()
    return [
        f"{patch} conflicts with main in {', '.join(unmerged(folder))}",
        f"{folder}: the tree to finish in: git status; edit; git add; git cherry-pick --continue",
        f"  then continue: make pr-branch VERL={verl} DIR={folder}",
    ]


def check_line(verl: Path, folder: Path, plan: BranchPlan) -> None:
    """Raise Refused unless ``start`` made ``folder`` from this clone and plan, and every conflict is resolved."""
    if not (folder / ".git").is_dir() or run_git("rev-parse", "--verify", "--quiet", ONTO, cwd=folder).returncode:
        raise Refused(f"DIR={folder} exists and was not made by make pr-branch; choose another folder")
    if begun := unfinished(folder):
        raise Refused(f"DIR={folder} has a {begun} to finish: git -C {folder} {begun} --continue; or remove it")
    at = run_git("symbolic-ref", "HEAD", cwd=folder).stdout.decode().strip()
    changed = git("status", "--porcelain", "--untracked-files=no", cwd=folder).splitlines()
    if at == CARRIED and changed:  # elsewhere it is this script that was interrupted
        raise Refused(f"DIR={folder} has uncommitted changes: {changed[0][3:]}")
    same_main = git("rev-parse", "refs/heads/main", cwd=verl) == git("rev-parse", ONTO, cwd=folder)
    if not same_main or git("config", PLAN, cwd=folder).strip() != plan.id:
        raise Refused(f"DIR={folder} was made from another main or from other patches: remove it and start anew")
    options = ("-G^(<{7}|>{7}) ", "--name-only", "--format=%s", f"{ONTO}..{CARRIED}")
    if marked := git("log", "-1", *options, cwd=folder).splitlines():
        where = f"{marked[-1]} of the commit {marked[0]!r}"
        raise Refused(f"DIR={folder} has a conflict marker in {where}: git commit --fixup, git rebase --autosquash")


# --- the second line: one commit a branch ----------------------------------------------------------------------------


def ends(plan: BranchPlan, folder: Path) -> Iterator[tuple[Branch, str]]:
    """Yield each branch with its last commit in the carried line.

    A commit without the trailer, such as one that resolves a conflict, belongs to the branch of the commit before it.
    """
    form = "--format=%H %(trailers:key=Branch,valueonly,separator=%x2C)"
    last, slug = {}, plan.branches[0].slug
    for line in git("log", "--reverse", form, f"{ONTO}..{CARRIED}", cwd=folder).splitlines():
        commit_id, _, trailer = line.partition(" ")
        slug = trailer or slug
        last[slug] = commit_id
    at = git("rev-parse", ONTO, cwd=folder).strip()
    for branch in plan.branches:
        at = last.get(branch.slug, at)  # a branch that upstream has already changes none of verl's files
        yield branch, at


def commit_branches(plan: BranchPlan, folder: Path, env: Mapping[str, str]) -> Iterator[Branch]:
    """Commit one branch after the other in ``folder``, and yield each while its tree is checked out there."""
    files: dict[str, bytes] = {}
    parent = ONTO
    for branch, at in ends(plan, folder):
        git("checkout", "--quiet", "--force", "--detach", at, cwd=folder)
        own, page = branch.own_files, f"docs/{PAGE}"
        if page in files and page in own:
            own[page] = files[page] + b"\n" + own[page]
        files |= stack_files(plan, branch) | own
        for path, content in files.items():
            write(folder / path, content)
        if page in files:
            add_to_index(folder / INDEX)
        git("add", "--force", "--all", "--", INDEX, *files, cwd=folder)
        generate(folder, env)
        commit_tree(branch, parent, folder)
        parent = f"refs/heads/{branch.name}"
        yield branch


def stack_files(plan: BranchPlan, branch: Branch) -> dict[str, bytes]:
    """Return the stack's verbatim files that the branch adds or changes, by path, without what it leaves out."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        for path, content in plan.stack.added.items():
            write(scratch / path, content)
        for patch in (branch.folder.parent / LEAVE_OUT, branch.folder / LEAVE_OUT):  # every branch's, then its own
            if patch.exists():
                git("apply", "-", cwd=scratch, stdin=patch.read_text())
        texts = {path: (scratch / path).read_text() for path in branch.files}
    for old, new in plan.replace:
        texts = {path: text.replace(old, new) for path, text in texts.items()}
    return {path: text.encode() for path, text in texts.items()}


def add_to_index(index: Path) -> None:
    """Add the page to the docs' table of contents, below the last page of the same folder."""
    text, count = re.subn(r"(.*^[ \t]*advance/[^\n]*\n)", rf"\1   {PAGE}\n", index.read_text(), flags=re.M | re.S)
    if not count:
        raise Refused(f"{INDEX} of main lists no page of advance/, below which {PAGE} could be added")
    index.write_text(text)


def generate(folder: Path, env: Mapping[str, str]) -> None:
    """Run upstream's generator of the composed configs, which fails the first time if they change, and add them."""
    for _ in range(2):
        done = subprocess.run(["bash", GENERATE], cwd=folder, env=env, capture_output=True, text=True)
        git("add", "--force", "--", f"{CONFIGS}/_generated_*.yaml", cwd=folder)
        if not done.returncode:
            return
    last = (done.stdout + done.stderr).strip().rpartition("\n")[2] or "no output"
    raise Refused(f"{GENERATE} of main failed with exit code {done.returncode}: {last}")


def commit_tree(branch: Branch, parent: str, folder: Path) -> None:
    """Commit the index as the branch, by the folder's author, on top of ``parent``."""
    command = ["git", "commit-tree", git("write-tree", cwd=folder).strip(), "-p", parent]
    made = subprocess.run(command, cwd=folder, input=f"{branch.title}\n", capture_output=True, text=True)
    if made.returncode:
        raise Refused(f"git commit-tree failed: {made.stderr.strip()}")
    git("reset", "--quiet", "--soft", made.stdout.strip(), cwd=folder)
    git("branch", "--force", branch.name, cwd=folder)


def deliver(plan: BranchPlan, folder: Path, verl: Path) -> None:
    names = [f"refs/heads/{branch.name}" for branch in plan.branches]
    quiet = ("--quiet", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance")
    git("fetch", *quiet, "--atomic", str(folder.resolve()), *(f"{name}:{name}" for name in names), cwd=verl)
