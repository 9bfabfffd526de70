"""The stack of one release: put it on a verl tree, take it off, and tell a tree's state.

How apply and unapply stay whole. A patched tree holds, beside verl's own files, the folder ``verl/.precision`` with
the originals of the files that were replaced and ``record.json``, which tells each file's blob id before and after:

1. apply stages everything in ``verl/.precision`` and writes record.json: a full disk shows here, before any change;
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

from .releases import (
    BOOK,
    PROJECT,
    STAMP,
    Refused,
    Release,
    blob_id,
    load_releases,
    verl_blobs,
    verl_tree_id,
)

RECORD = f"{BOOK}/record.json"

OVERLAYS = "verl/trainer/config/precision"
TRAILERS = ("Reason", "Origin", "Forwarded", "Applied-Upstream")
REASONS = ("backport", "pending", "local")
# A hook changes a file that verl has; nothing but `index` follows `diff --git` then.
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
            raise Refused(f"{self.name} may only change files that verl has, and needs their full blob ids")
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
        if not self.before and verl_tree_id(blobs) != self.release.tree_before:
            return ["verl/"]
        return self.changed(blobs) + [path for path in self.added if path in blobs]

    def changed(self, blobs: Mapping[str, str]) -> list[str]:
        """Return the paths that the patches hook and that are not the release's in a tree with these blobs."""
        return [path for path, blob in self.before.items() if blobs.get(path) != blob]

    def rest_is_release(self, blobs: Mapping[str, str]) -> bool:
        """Whether the files that the stack does not touch are just those of the release's wheel."""
        rest = {path: blob for path, blob in blobs.items() if path not in self.added}
        return verl_tree_id({**rest, **self.before}) == self.release.tree_before


def verbatim_files(project: Path = PROJECT) -> dict[str, Path]:
    """Return the project's files that are copied into every release, by their path in the target."""
    files, overlays = project / "patches/verl/files", project / "configs/precision"
    found = {path.relative_to(files).as_posix(): path for path in sorted(files.rglob("*")) if path.is_file()}
    found = {target: path for target, path in found.items() if "__pycache__" not in target}
    return found | {f"{OVERLAYS}/{path.name}": path for path in sorted(overlays.glob("*.yaml"))}


def load_stack(release: Release, project: Path = PROJECT) -> Stack:
    """Read a release's series, patches and verbatim files; raises Refused where they do not fit each other."""
    folder = project / f"patches/verl/v{release.name}"
    series = folder / "series"
    names = series.read_text().split() if series.exists() else []
    if astray := sorted({path.name for path in folder.glob("*.patch")} ^ set(names)):
        raise Refused(f"{folder} and its series disagree about {', '.join(astray)}")
    patches = tuple(Patch(name, (folder / name).read_bytes().decode()) for name in names)
    return make_stack(release, patches, {path: file.read_bytes() for path, file in verbatim_files(project).items()})


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


def load_stacks(project: Path = PROJECT) -> list[Stack]:
    """Return the stack of every release in versions.toml."""
    return [load_stack(release, project) for release in load_releases(project).values()]


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
                raise Refused(f"{path} is not what the patches of verl {stack.release.name} start from; reinstall verl")
            write(scratch / path, content)
        for patch in stack.patches:
            git("apply", "--whitespace=nowarn", "-", cwd=scratch, stdin=patch.text)
        hooked = {path: (scratch / path).read_bytes() for path in stack.after}
    if wrong := [path for path, content in hooked.items() if blob_id(content) != stack.after[path]]:
        raise Refused(f"the patches of verl {stack.release.name} do not make of {wrong[0]} what they say")
    return hooked


def write(path: Path, content: bytes) -> None:
    """Write a file, making its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# --- the state of a target ------------------------------------------------------------------------------------------


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
        """Return the files of the record that unapply cannot account for; a reinstalled verl is not an edit."""
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


def verl_root(target: Path) -> Path:
    """Return the folder that holds verl/: ``target``, or its parent where ``target`` is the package itself."""
    for root in (target, target.parent):
        if (root / "verl/__init__.py").is_file() and (root / "verl") in (target, target / "verl"):
            return root
    what = "holds no verl/__init__.py" if target.is_dir() else "is not a folder"
    raise Refused(f"{target} {what}; give a checkout of verl, an unpacked release or a site-packages folder")


@contextlib.contextmanager
def locked(target: Path) -> Iterator[Path]:
    """Hold the target's verl/ folder for this process alone; the lock goes with the process, however that ends."""
    root = verl_root(Path(os.path.abspath(target)))
    folder = os.open(root / "verl", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield root
    finally:
        os.close(folder)


def read_record(root: Path) -> Record | None:
    """Return the target's record, or None where nothing was begun."""
    path = root / RECORD
    return Record(**json.loads(path.read_text())) if path.exists() else None


def status(target: Path, project: Path = PROJECT) -> Status:
    """Tell a target's state; changes nothing."""
    with locked(target) as root:
        return examine(root, verl_blobs(root), read_record(root), load_stacks(project))


def examine(root: Path, blobs: Mapping[str, str], record: Record | None, stacks: list[Stack]) -> Status:
    """Tell the state of the tree at ``root`` from its blobs and its record."""
    stamped = record and (root / STAMP).exists() and (root / STAMP).read_bytes() == record.stamp_file
    stamp = record.stamp if stamped else None
    if record and (edited := record.edited(blobs)):
        detail = f"edited after apply: {listed(edited)}; save the edits, then put the files back or reinstall verl"
        return Status("dirty", detail, record.release, stamp=stamp)
    pristine = record.undone(blobs) if record else blobs
    matching = [stack for stack in stacks if not stack.foreign_to(pristine)]
    if not matching:
        state, detail = unmatched(root, pristine, record, stacks)
        return Status(state, detail, stamp=stamp)
    stack = max(matching, key=lambda stack: stack.rest_is_release(pristine))
    exact = stack.rest_is_release(pristine)
    name = f"verl {stack.release.name}" + ("" if exact else " (its untouched files differ from the wheel's)")
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
    why = "apply or unapply was interrupted, or verl was reinstalled over the stack"
    return "interrupted", f"{name}: {why}; the next apply or unapply repairs it"


def unmatched(root: Path, pristine: Mapping[str, str], record: Record | None, stacks: list[Stack]) -> tuple[str, str]:
    """Return state and detail of a tree that is no release: the closest one and the files that differ from it."""
    by_name = {stack.release.name: stack for stack in stacks}
    if record and record.release not in by_name:
        whose = f"another version of this project, for verl {record.release}, stack {record.stack}"
        return "foreign", f"patched by {whose}; make unapply-patches VERL={root} takes that off"
    stamp = None if record or not (root / STAMP).exists() else json.loads((root / STAMP).read_bytes())
    told = record.release if record else stamp and stamp["release"]
    stack = by_name[told] if told in by_name else closest(pristine, stacks)
    name, differing = stack.release.name, stack.foreign_to(pristine)
    ours = {**stack.after, **{path: blob_id(content) for path, content in stack.added.items()}}
    strange = [path for path in differing if pristine.get(path) != ours.get(path, "")]
    reset = f"reinstall verl {name} or check its files out again"
    if not strange:
        return "half-patched", f"verl {name}, but {differing[0]} is patched and apply left no record; {reset}"
    if stamp:
        lost = f"but without the record in {BOOK} that unapply needs"
        again = f"reinstall verl {told} or check its files out again, then apply"
        return "half-patched", f"verl {told} with stack {stamp['stack']}, {lost}; {again}"
    if record:
        return "dirty", f"verl {name}, but for {listed(strange)}; save your edits, then {reset}"
    ways = f"make drift VERL={root} lists them, make port FROM={name} TO={root} carries the stack over"
    if stack.rest_is_release(pristine):
        commit = f"where they are a later commit's, {ways}"
        return "dirty", f"verl {name}, but for {listed(strange)}; save your edits, then {reset}; {commit}"
    share = f"of the {len(stack.before)} files that its stack hooks, {len(strange)} differ: {listed(strange)}"
    return "foreign", f"matches none of verl {', '.join(by_name)}; the closest is {name}, {share}; {ways}"


def listed(paths: list[str]) -> str:
    """The first three paths, and how many more there are."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


# --- apply and unapply ----------------------------------------------------------------------------------------------


def apply(target: Path, project: Path = PROJECT) -> list[str]:
    """Put the stack on ``target`` and return what was done, a line each.

    Does nothing to a target that carries this very stack; takes another version of the stack off first. Raises Refused,
    with nothing changed, on a target that is half-patched, dirty or foreign, and OSError where it cannot be written.
    """
    with locked(target) as root:
        stacks = load_stacks(project)
        blobs, record = verl_blobs(root), read_record(root)
        found = examine(root, blobs, record, stacks)
        if found.state == "patched":
            return [f"{found.detail}: nothing to do"]
        if found.state not in ("pristine", "outdated", "interrupted"):
            raise Refused(f"{root}: {found.state}: {found.detail}")
        stack = next(stack for stack in stacks if stack.release.name == found.release)
        if not stack.patches:
            raise Refused(f"verl {found.release} has no patches yet")
        kept = record.hooked(blobs) if record else []
        hooked = hooked_files(stack, lambda path: (original(root, path) if path in kept else root / path).read_bytes())
        new = make_record(stack, record.undone(blobs) if record else blobs)
        refuse_unwritable(root, new)
        done = []
        if record:
            roll_back(root, record, blobs)
            done = [f"verl {record.release}: stack {record.stack} taken off first"]
        put_on(root, new, {**hooked, **stack.added})
    counts = f"{len(new.replaced)} files hooked, {len(new.added)} copied, stamp {new.stack} in {STAMP}"
    return [*done, f"verl {new.release}: {counts}"]


def unapply(target: Path, project: Path = PROJECT) -> list[str]:
    """Take the stack off ``target``, to the byte, and return what was done, a line each.

    Does nothing to a pristine target. Raises Refused, with nothing changed, where files were edited since apply or
    where the target is neither pristine nor has the record that apply keeps.
    """
    with locked(target) as root:
        blobs, record = verl_blobs(root), read_record(root)
        if record and not record.edited(blobs):
            roll_back(root, record, blobs)
            counts = f"{len(record.replaced)} files restored, {len(record.added)} removed"
            return [f"verl {record.release}: stack {record.stack} taken off, {counts}"]
        found = examine(root, blobs, record, load_stacks(project))
        if found.state != "pristine":
            raise Refused(f"{root}: {found.state}: {found.detail}")
        sweep(root)
        return [f"{found.detail}: nothing to do"]


def make_record(stack: Stack, pristine: Mapping[str, str]) -> Record:
    """Return what putting ``stack`` on a tree of these blobs does."""
    added = {path: blob_id(content) for path, content in stack.added.items()}
    folders = {folder.as_posix() for path in added for folder in Path(path).parents}
    folders -= {folder.as_posix() for path in pristine for folder in Path(path).parents}
    replaced = {path: (before, stack.after[path]) for path, before in stack.before.items()}
    tree = verl_tree_id({**pristine, **stack.after, **added})
    return Record(stack.release.name, stack.id, tree, replaced, added, sorted(folders))


def put_on(root: Path, record: Record, contents: Mapping[str, bytes]) -> None:
    """Do what ``record`` tells on a pristine tree; what fails midway is rolled back before it is raised."""
    try:
        stage(root, record, contents)
        for folder in record.folders:
            (root / folder).mkdir(exist_ok=True)
        for path in contents:
            os.replace(staged(root, path), root / path)
            drop_compiled(root / path)
        os.replace(staged(root, STAMP), root / STAMP)
    except BaseException:
        if (root / RECORD).exists():
            roll_back(root, record, verl_blobs(root))
        else:
            sweep(root)
        raise


def stage(root: Path, record: Record, contents: Mapping[str, bytes]) -> None:
    """Write into the target's bookkeeping all that putting the stack on will need, the record last."""
    sweep(root)
    (root / BOOK).mkdir()
    (root / BOOK / ".gitignore").write_text("*\n")  # where the target is a git checkout
    for path, content in {**contents, STAMP: record.stamp_file, RECORD: json.dumps(asdict(record)).encode()}.items():
        staged(root, path).write_bytes(content)
    for path in record.replaced:
        shutil.copy2(root / path, original(root, path))
        shutil.copymode(root / path, staged(root, path))
    os.replace(staged(root, RECORD), root / RECORD)


def staged(root: Path, path: str) -> Path:
    """Where the file that is to be renamed to ``path`` is made."""
    return root / BOOK / f"new+{path.replace('/', '+')}"


def original(root: Path, path: str) -> Path:
    """Where the file that was at ``path`` is kept."""
    return root / BOOK / f"old+{path.replace('/', '+')}"


def roll_back(root: Path, record: Record, blobs: Mapping[str, str]) -> None:
    """Undo what ``record`` tells on the tree of these ``blobs``; where it is cut short it can be called again."""
    hooked = record.hooked(blobs)
    for path in hooked:
        if blob_id(original(root, path).read_bytes()) != record.replaced[path][0]:
            raise Refused(f"{original(root, path)} was changed since apply; reinstall verl {record.release}")
    refuse_unwritable(root, record)
    (root / STAMP).unlink(missing_ok=True)
    for path in hooked:
        os.replace(original(root, path), root / path)
    for path in record.added:
        (root / path).unlink(missing_ok=True)
    for path in [*record.replaced, *record.added]:
        drop_compiled(root / path)
    for folder in map(root.joinpath, reversed(record.folders)):
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
    (root / RECORD).unlink()
    sweep(root)


def sweep(root: Path) -> None:
    """Remove bookkeeping that no record speaks for any more."""
    (root / STAMP).unlink(missing_ok=True)
    if (root / BOOK).exists():
        shutil.rmtree(root / BOOK)


def drop_compiled(path: Path) -> None:
    """Remove what Python compiled from ``path``: it would pass for the new file's if time and size are the same."""
    cache = path.parent / "__pycache__"
    for compiled in cache.glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    if cache.exists() and not any(cache.iterdir()):
        cache.rmdir()


def refuse_unwritable(root: Path, record: Record) -> None:
    """Raise Refused where a folder that would change is read-only."""
    paths = [BOOK, STAMP, *record.replaced, *record.added]
    for folder in sorted({(root / path).parent for path in paths}):
        if folder.exists() and not os.access(folder, os.W_OK):
            raise Refused(f"{folder} is read-only; nothing was changed")
