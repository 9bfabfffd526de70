"""The stack of one release: put it on a tree of its framework, take it off, and tell a tree's state.

How apply and unapply stay whole. A patched tree holds, in its package, the folder ``.precision`` with
the originals of the files that were replaced and ``record.json``, which tells each file's blob id before and after:

1. apply stages everything in ``.precision`` and writes record.json: a full disk shows here, before any change;
2. it renames the staged files into place, and last of all the stamp;
3. unapply removes the stamp, renames the originals back, and removes record.json.

So a record without a stamp means that one of the two was cut short, and step 3 repairs it; and unapply is exact
whatever has become of the patches since, because it needs nothing but the record.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lib.errors import Refused
from lib.patches.releases import VERL, Framework, Release, blob_id, load_releases, package_blobs, package_tree_id
from lib.paths import REPO

TRAILERS = ("Reason", "Origin", "Forwarded", "Applied-Upstream")
REASONS = ("backport", "pending", "local")
# A hook changes a file that the release has; nothing but `index` follows `diff --git` then.
DIFF = re.compile(r"^diff --git a/(\S+) b/\1\nindex ([0-9a-f]{40})\.\.([0-9a-f]{40}) 100644$", re.M)


# --- the stack, as the project holds it ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patch:
    """A hook patch: ``message`` is a commit message (subject, why it exists and how it dies, trailers)."""

    name: str
    text: str

    @property
    def message(self) -> str:
        return self.text.partition("\n---\n")[0].removeprefix("Subject: ")

    @property
    def subject(self) -> str:
        return self.message.partition("\n")[0]

    @property
    def blobs(self) -> list[tuple[str, str, str]]:
        """Path, blob id before and blob id after of each file that the patch changes."""
        found = DIFF.findall(self.text)
        if not found or len(found) != len(re.findall(r"^diff --git ", self.text, re.M)):
            raise Refused(f"{self.name} may only change files that the release has, and needs their full blob ids")
        return found


@dataclass(frozen=True)
class Stack:
    """What apply does to one release: ``before`` and ``after`` are blob ids by path, ``added`` the files copied in."""

    release: Release
    patches: tuple[Patch, ...]
    before: Mapping[str, str]
    after: Mapping[str, str]
    added: Mapping[str, bytes]
    id: str

    def foreign_to(self, blobs: Mapping[str, str]) -> list[str]:
        """Return the paths that keep a tree with these blobs from being this release's pristine tree."""
        if not self.before and package_tree_id(blobs) != self.release.tree_before:
            return [f"{self.release.framework.name}/"]
        return self.changed(blobs) + [path for path in (*self.added, *self.shadowed) if path in blobs]

    @property
    def shadowed(self) -> list[str]:
        """Return the modules that Python would not find any more, because an added package has their name."""
        return [path.removesuffix("/__init__.py") + ".py" for path in self.added if path.endswith("/__init__.py")]

    def changed(self, blobs: Mapping[str, str]) -> list[str]:
        """Return the paths that the patches hook and that are not the release's in a tree with these blobs."""
        return [path for path, blob in self.before.items() if blobs.get(path) != blob]

    def rest_is_release(self, blobs: Mapping[str, str]) -> bool:
        """Whether the files that the stack does not touch are just those of the release's wheel."""
        rest = {path: blob for path, blob in blobs.items() if path not in self.added}
        return package_tree_id({**rest, **self.before}) == self.release.tree_before


def verbatim_files(project: Path = REPO, framework: Framework = VERL) -> dict[str, Path]:
    """Return the project's files that are copied into every release, by their path in the target."""
    files, overlays = framework.home(project) / "files", project / "configs/precision"
    found = {path.relative_to(files).as_posix(): path for path in sorted(files.rglob("*")) if path.is_file()}
    found = {target: path for target, path in found.items() if "__pycache__" not in target}
    if framework.overlays:
        found |= {f"{framework.overlays}/{path.name}": path for path in sorted(overlays.glob("*.yaml"))}
    return found


def load_stack(release: Release, project: Path = REPO) -> Stack:
    """Read a release's series, patches and verbatim files; raises Refused where they do not fit each other."""
    folder = release.framework.home(project) / f"v{release.name}"
    series = folder / "series"
    names = series.read_text().split() if series.exists() else []
    if astray := sorted({path.name for path in folder.glob("*.patch")} ^ set(names)):
        raise Refused(f"{folder} and its series disagree about {', '.join(astray)}")
    patches = tuple(Patch(name, (folder / name).read_bytes().decode()) for name in names)
    files = verbatim_files(project, release.framework)
    return make_stack(release, patches, {path: file.read_bytes() for path, file in files.items()})


def make_stack(release: Release, patches: tuple[Patch, ...], added: Mapping[str, bytes]) -> Stack:
    """Return the stack of these patches, in order, and files; raises Refused where a patch does not follow another."""
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    for patch in patches:
        for path, old, new in patch.blobs:
            before.setdefault(path, old)
            if after.get(path, old) != old:
                raise Refused(f"{patch.name} does not start from what the patches before it make of {path}")
            after[path] = new
    digest = hashlib.sha256()
    for name, content in [*((patch.name, patch.text.encode()) for patch in patches), *added.items()]:
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return Stack(release, patches, before, after, added, digest.hexdigest()[:12])


def load_stacks(project: Path = REPO, framework: Framework = VERL) -> list[Stack]:
    """Return the stack of every release in the framework's versions.toml."""
    return [load_stack(release, project) for release in load_releases(project, framework).values()]


def closest(blobs: Mapping[str, str], stacks: list[Stack]) -> Stack:
    """Return the stack of whose hooked files a tree with these blobs has the largest share; the newest of equals."""
    hooking = [stack for stack in stacks if stack.before]
    return max(reversed(hooking), key=lambda stack: 1 - len(stack.changed(blobs)) / len(stack.before))


def trailers(patch: Patch) -> dict[str, str]:
    """Return the trailers as ``git interpret-trailers`` reads them; raises Refused where the header is not complete."""
    with tempfile.TemporaryDirectory() as scratch:
        lines = git("interpret-trailers", "--parse", cwd=Path(scratch), stdin=patch.text).splitlines()
    found = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if lacking := [key for key in TRAILERS if not found.get(key)]:
        raise Refused(f"{patch.name} lacks the trailer {' and '.join(lacking)}")
    if found["Reason"] not in REASONS:
        raise Refused(f"{patch.name} has Reason: {found['Reason']}; allowed: {', '.join(REASONS)}")
    return found


# --- git ------------------------------------------------------------------------------------------------------------

# Nothing of the caller's git set-up may change a result: no configuration, no surrounding repository (inside one,
# `git apply` skips files and exits 0), no clock.
IDENTITY = {
    f"GIT_{role}_{key}": value
    for role in ("AUTHOR", "COMMITTER")
    for key, value in {"NAME": "verl-precision", "EMAIL": "", "DATE": "2000-01-01T00:00:00Z"}.items()
}


def git(*args: str, cwd: Path, stdin: str = "") -> str:
    """Run git in ``cwd`` and return what it prints; raises Refused with its complaint."""
    done = run_git(*args, cwd=cwd, stdin=stdin)
    if done.returncode:
        reason = done.stderr.decode().strip().partition("\n")[0]
        raise Refused(f"git {args[0]} failed with exit code {done.returncode}: {reason}")
    return done.stdout.decode()


def run_git(*args: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[bytes]:
    """Run git in ``cwd``, whatever comes of it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | IDENTITY
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    env["GIT_CEILING_DIRECTORIES"] = str(cwd.resolve().parent)
    return subprocess.run(["git", *args], cwd=cwd, env=env, input=stdin.encode(), capture_output=True)


def hooked_files(stack: Stack, pristine: Callable[[str], bytes]) -> dict[str, bytes]:
    """Return the content after the patches of each file that they touch, made and verified in a scratch folder."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        for path, before in stack.before.items():
            content = pristine(path)
            if blob_id(content) != before:
                again = f"reinstall {stack.release.framework.name}"
                raise Refused(f"{path} is not what the patches of {stack.release} start from; {again}")
            write(scratch / path, content)
        for patch in stack.patches:
            git("apply", "--whitespace=nowarn", "-", cwd=scratch, stdin=patch.text)
        hooked = {path: (scratch / path).read_bytes() for path in stack.after}
    if wrong := [path for path, content in hooked.items() if blob_id(content) != stack.after[path]]:
        raise Refused(f"the patches of {stack.release} do not make of {wrong[0]} what they say")
    return hooked


def write(path: Path, content: bytes) -> None:
    """Write a file, making its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# --- the state of a target ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A tree to patch: ``root`` is the folder that holds the framework's package."""

    root: Path
    framework: Framework

    @property
    def stamp(self) -> Path:
        return self.root / self.framework.stamp

    @property
    def book(self) -> Path:
        return self.root / self.framework.book

    @property
    def record(self) -> Path:
        return self.book / "record.json"

    @property
    def word(self) -> str:
        """What names this target on make's command line."""
        return f"{self.framework.name.upper()}={self.root}"

    def staged(self, path: str) -> Path:
        """Where the file that is to be renamed to ``path`` is made."""
        return self.book / f"new+{path.replace('/', '+')}"

    def original(self, path: str) -> Path:
        """Where the file that was at ``path`` is kept."""
        return self.book / f"old+{path.replace('/', '+')}"

    def blobs(self) -> dict[str, str]:
        return package_blobs(self.root, self.framework)


@dataclass(frozen=True)
class Record:
    """What apply did: blob ids before and after of the files replaced, blob ids of those added, folders created."""

    release: str
    stack: str
    tree: str
    replaced: dict[str, tuple[str, str]]
    added: dict[str, str]
    folders: list[str]

    @property
    def stamp(self) -> dict[str, str]:
        return {"release": self.release, "stack": self.stack, "tree": self.tree}

    @property
    def stamp_file(self) -> bytes:
        return json.dumps(self.stamp).encode() + b"\n"

    def hooked(self, blobs: Mapping[str, str]) -> list[str]:
        return [path for path, (_, after) in self.replaced.items() if blobs.get(path) == after]

    def edited(self, blobs: Mapping[str, str]) -> list[str]:
        """Return the files of the record that unapply cannot account for; a reinstalled package is not an edit."""
        known = {path: (blob, None) for path, blob in self.added.items()} | (
            self.replaced if self.hooked(blobs) else {}
        )
        return [path for path, ids in known.items() if blobs.get(path) not in ids]

    def undone(self, blobs: Mapping[str, str]) -> dict[str, str]:
        """Return the blobs as unapply would leave them."""
        undone = {path: blob for path, blob in blobs.items() if self.added.get(path) != blob}
        return undone | {path: self.replaced[path][0] for path in self.hooked(blobs)}


@dataclass(frozen=True)
class Status:
    """What a target is.

    ``state`` is one of pristine, patched, outdated (patched by another version of the stack), interrupted (the next
    apply or unapply repairs it), half-patched, dirty, foreign; ``detail`` says in one line what that means here and
    what to do. ``exact``: the files that the stack does not touch are the wheel's. ``stamp`` is the target's own.
    """

    state: str
    detail: str
    release: str | None = None
    exact: bool = False
    stack: str | None = None
    stamp: dict[str, str] | None = None


def find_target(path: Path, *frameworks: Framework) -> Target:
    """Return what ``path`` holds, or is: the package of just one of ``frameworks``; raises Refused otherwise."""
    found = []
    for framework in frameworks:
        for root in (path, path.parent):
            package = root / framework.name
            if (package / "__init__.py").is_file() and package in (path, path / framework.name):
                found.append(Target(root, framework))
                break
    if len(found) == 1:
        return found[0]
    if found:
        names = [target.framework.name for target in found]
        raise Refused(f"{path} holds {' and '.join(names)}; choose one: --framework {' or '.join(names)}")
    names = [framework.name for framework in frameworks]
    what = f"holds no {' or '.join(f'{name}/__init__.py' for name in names)}" if path.is_dir() else "is not a folder"
    kinds = f"a checkout of {' or '.join(names)}, an unpacked release or a site-packages folder"
    raise Refused(f"{path} {what}; give {kinds}")


@contextlib.contextmanager
def locked(path: Path, framework: Framework = VERL) -> Iterator[Target]:
    """Hold the target's package for this process alone; the lock goes with the process, however that ends."""
    target = find_target(Path(os.path.abspath(path)), framework)
    folder = os.open(target.root / framework.name, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield target
    finally:
        os.close(folder)


def read_record(target: Target) -> Record | None:
    """Return the target's record, or None where nothing was begun."""
    return Record(**json.loads(target.record.read_text())) if target.record.exists() else None


def status(path: Path, project: Path = REPO, framework: Framework = VERL) -> Status:
    """Tell a target's state; changes nothing."""
    with locked(path, framework) as target:
        return examine(target, target.blobs(), read_record(target), load_stacks(project, framework))


def examine(target: Target, blobs: Mapping[str, str], record: Record | None, stacks: list[Stack]) -> Status:
    """Tell the state of the target from its blobs, its record and the stacks of its framework."""
    stamped = record and target.stamp.exists() and target.stamp.read_bytes() == record.stamp_file
    stamp = record.stamp if stamped else None
    if record and (edited := record.edited(blobs)):
        ways = f"save the edits, then put the files back or reinstall {target.framework.name}"
        detail = f"edited after apply: {listed(edited)}; {ways}"
        return Status("dirty", detail, record.release, stamp=stamp)
    pristine = record.undone(blobs) if record else blobs
    matching = [stack for stack in stacks if not stack.foreign_to(pristine)]
    if not matching:
        state, detail = unmatched(target, pristine, record, stacks)
        return Status(state, detail, stamp=stamp)
    stack = max(matching, key=lambda stack: stack.rest_is_release(pristine))
    exact = stack.rest_is_release(pristine)
    name = str(stack.release) + ("" if exact else " (its untouched files differ from the wheel's)")
    state, detail = matched(name, stack, blobs, record, bool(stamp))
    return Status(state, detail, stack.release.name, exact, stack.id, stamp)


def matched(name: str, stack: Stack, blobs: Mapping[str, str], record: Record | None, stamped: bool) -> tuple[str, str]:
    """Return state and detail of a tree, described by ``name``, that is its release once the record is undone."""
    if not record:
        return "pristine", f"{name}, no stack applied"
    hooked = record.hooked(blobs)
    bare = [path for path in record.replaced if path not in hooked] + [p for p in record.added if p not in blobs]
    if stamped and not bare:
        if (record.release, record.stack) == (stack.release.name, stack.id):
            return "patched", f"{name} with stack {stack.id}"
        return "outdated", f"{name} with stack {record.stack}; apply brings it to {stack.id}"
    if stamped and hooked:
        return "half-patched", f"{name} with stack {record.stack}, but {bare[0]} is not patched; unapply restores it"
    why = f"apply or unapply was interrupted, or {stack.release.framework.name} was reinstalled over the stack"
    return "interrupted", f"{name}: {why}; the next apply or unapply repairs it"


def unmatched(
    target: Target, pristine: Mapping[str, str], record: Record | None, stacks: list[Stack]
) -> tuple[str, str]:
    """Return state and detail of a tree that is no release: the closest one and the files that differ from it."""
    framework = target.framework.name
    by_name = {stack.release.name: stack for stack in stacks}
    if record and record.release not in by_name:
        whose = f"another version of this project, for {framework} {record.release}, stack {record.stack}"
        return "foreign", f"patched by {whose}; make unapply-patches {target.word} takes that off"
    stamp = None if record or not target.stamp.exists() else json.loads(target.stamp.read_bytes())
    told = record.release if record else stamp and stamp["release"]
    stack = by_name[told] if told in by_name else closest(pristine, stacks)
    name, differing = str(stack.release), stack.foreign_to(pristine)
    ours = {**stack.after, **{path: blob_id(content) for path, content in stack.added.items()}}
    strange = [path for path in differing if pristine.get(path) != ours.get(path, "")]
    reset = f"reinstall {name} or check its files out again"
    if not strange:
        return "half-patched", f"{name}, but {differing[0]} is patched and apply left no record; {reset}"
    if stamp:
        lost = f"but without the record in {target.framework.book} that unapply needs"
        again = f"reinstall {framework} {told} or check its files out again, then apply"
        return "half-patched", f"{framework} {told} with stack {stamp['stack']}, {lost}; {again}"
    if record:
        return "dirty", f"{name}, but for {listed(strange)}; save your edits, then {reset}"
    carry = f"make port FRAMEWORK={framework} FROM={stack.release.name} TO={target.root}"
    ways = f"make drift {target.word} lists them, {carry} carries the stack over"
    if stack.rest_is_release(pristine):
        commit = f"where they are a later commit's, {ways}"
        return "dirty", f"{name}, but for {listed(strange)}; save your edits, then {reset}; {commit}"
    share = f"of the {len(stack.before)} files that its stack hooks, {len(strange)} differ: {listed(strange)}"
    which = f"matches none of {framework} {', '.join(by_name)}; the closest is {stack.release.name}"
    return "foreign", f"{which}, {share}; {ways}"


def listed(paths: list[str]) -> str:
    """The first three paths, and how many more there are."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


# --- apply and unapply ----------------------------------------------------------------------------------------------


def apply(path: Path, project: Path = REPO, framework: Framework = VERL) -> list[str]:
    """Put the stack on the target and return what was done, a line each.

    Does nothing to a target that carries this very stack; takes another version of the stack off first. Raises Refused,
    with nothing changed, on a target that is half-patched, dirty or foreign, and OSError where it cannot be written.
    """
    with locked(path, framework) as target:
        stacks = load_stacks(project, framework)
        blobs, record = target.blobs(), read_record(target)
        found = examine(target, blobs, record, stacks)
        if found.state == "patched":
            return [f"{found.detail}: nothing to do"]
        if found.state not in ("pristine", "outdated", "interrupted"):
            raise Refused(f"{target.root}: {found.state}: {found.detail}")
        stack = next(stack for stack in stacks if stack.release.name == found.release)
        if not stack.patches:
            raise Refused(f"{stack.release} has no patches yet")
        kept = record.hooked(blobs) if record else []
        hooked = hooked_files(
            stack, lambda path: (target.original(path) if path in kept else target.root / path).read_bytes()
        )
        new = make_record(stack, record.undone(blobs) if record else blobs)
        refuse_unwritable(target, new)
        done = []
        if record:
            roll_back(target, record, blobs)
            done = [f"{framework.name} {record.release}: stack {record.stack} taken off first"]
        put_on(target, new, {**hooked, **stack.added})
    counts = f"{len(new.replaced)} files hooked, {len(new.added)} copied, stamp {new.stack} in {framework.stamp}"
    return [*done, f"{stack.release}: {counts}"]


def unapply(path: Path, project: Path = REPO, framework: Framework = VERL) -> list[str]:
    """Take the stack off the target, to the byte, and return what was done, a line each.

    Does nothing to a pristine target. Raises Refused, with nothing changed, where files were edited since apply or
    where the target is neither pristine nor has the record that apply keeps.
    """
    with locked(path, framework) as target:
        blobs, record = target.blobs(), read_record(target)
        if record and not record.edited(blobs):
            roll_back(target, record, blobs)
            counts = f"{len(record.replaced)} files restored, {len(record.added)} removed"
            return [f"{framework.name} {record.release}: stack {record.stack} taken off, {counts}"]
        found = examine(target, blobs, record, load_stacks(project, framework))
        if found.state != "pristine":
            raise Refused(f"{target.root}: {found.state}: {found.detail}")
        sweep(target)
        return [f"{found.detail}: nothing to do"]


def make_record(stack: Stack, pristine: Mapping[str, str]) -> Record:
    """Return what putting ``stack`` on a tree of these blobs does."""
    added = {path: blob_id(content) for path, content in stack.added.items()}
    folders = {folder.as_posix() for path in added for folder in Path(path).parents}
    folders -= {folder.as_posix() for path in pristine for folder in Path(path).parents}
    replaced = {path: (before, stack.after[path]) for path, before in stack.before.items()}
    tree = package_tree_id({**pristine, **stack.after, **added})
    return Record(stack.release.name, stack.id, tree, replaced, added, sorted(folders))


def put_on(target: Target, record: Record, contents: Mapping[str, bytes]) -> None:
    """Do what ``record`` tells on a pristine tree; what fails midway is rolled back before it is raised."""
    try:
        stage(target, record, contents)
        for folder in record.folders:
            (target.root / folder).mkdir(exist_ok=True)
        for path in contents:
            os.replace(target.staged(path), target.root / path)
            drop_compiled(target.root / path)
        os.replace(target.staged(target.framework.stamp), target.stamp)
    except BaseException:
        if target.record.exists():
            roll_back(target, record, target.blobs())
        else:
            sweep(target)
        raise


def stage(target: Target, record: Record, contents: Mapping[str, bytes]) -> None:
    """Write into the target's bookkeeping all that putting the stack on will need, the record last."""
    sweep(target)
    target.book.mkdir()
    (target.book / ".gitignore").write_text("*\n")  # where the target is a git checkout
    for path, content in {**contents, target.framework.stamp: record.stamp_file}.items():
        target.staged(path).write_bytes(content)
    for path in record.replaced:
        shutil.copy2(target.root / path, target.original(path))
        shutil.copymode(target.root / path, target.staged(path))
    begun = target.staged("record.json")
    begun.write_text(json.dumps(asdict(record)))
    os.replace(begun, target.record)


def roll_back(target: Target, record: Record, blobs: Mapping[str, str]) -> None:
    """Undo what ``record`` tells on the tree of these ``blobs``; where it is cut short it can be called again."""
    hooked = record.hooked(blobs)
    for path in hooked:
        if blob_id(target.original(path).read_bytes()) != record.replaced[path][0]:
            again = f"reinstall {target.framework.name} {record.release}"
            raise Refused(f"{target.original(path)} was changed since apply; {again}")
    refuse_unwritable(target, record)
    target.stamp.unlink(missing_ok=True)
    for path in hooked:
        os.replace(target.original(path), target.root / path)
    for path in record.added:
        (target.root / path).unlink(missing_ok=True)
    for path in [*record.replaced, *record.added]:
        drop_compiled(target.root / path)
    for folder in map(target.root.joinpath, reversed(record.folders)):
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
    target.record.unlink()
    sweep(target)


def sweep(target: Target) -> None:
    """Remove bookkeeping that no record speaks for any more."""
    target.stamp.unlink(missing_ok=True)
    if target.book.exists():
        shutil.rmtree(target.book)


def drop_compiled(path: Path) -> None:
    """Remove what Python compiled from ``path``: it would pass for the new file's if time and size are the same."""
    cache = path.parent / "__pycache__"
    for compiled in cache.glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    if cache.exists() and not any(cache.iterdir()):
        cache.rmdir()


def refuse_unwritable(target: Target, record: Record) -> None:
    """Raise Refused where a folder that would change is read-only."""
    paths = [target.framework.book, target.framework.stamp, *record.replaced, *record.added]
    for folder in sorted({(target.root / path).parent for path in paths}):
        if folder.exists() and not os.access(folder, os.W_OK):
            raise Refused(f"{folder} is read-only; nothing was changed")
