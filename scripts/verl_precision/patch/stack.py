"""Load the stacks of a release: its hook patches, in two series, and the files that are copied in verbatim.

The series ``precision`` acts on the keys that a user sets. The series ``fixes`` corrects the framework in any dtype and
builds on ``precision``: a tree has ``precision``, or both.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.patch.git_objects import blob_id, package_tree_id
from verl_precision.patch.releases import VERL, Framework, Release, load_releases
from verl_precision.paths import REPO

TRAILERS = ("Reason", "Origin", "Forwarded", "Applied-Upstream")
REASONS = ("backport", "pending", "local")
FIXES = "Series: fixes"  # a trailer of the patches of that series
# A hook changes a file that the release has, so only `index` follows `diff --git`.
DIFF = re.compile(r"^diff --git a/(\S+) b/\1\nindex ([0-9a-f]{40})\.\.([0-9a-f]{40}) 100644$", re.M)


@dataclass(frozen=True)
class Patch:
    """A hook patch: ``message`` is a commit message (subject, why it exists, when it can be dropped, trailers)."""

    name: str
    text: str

    @property
    def message(self) -> str:
        return self.text.partition("\n---\n")[0].removeprefix("Subject: ")

    @property
    def subject(self) -> str:
        return self.message.partition("\n")[0]

    @property
    def fixes(self) -> bool:
        return FIXES in self.trailer_lines

    @property
    def trailer_lines(self) -> list[str]:
        return self.message.rstrip().rpartition("\n\n")[2].splitlines()

    @cached_property
    def blobs(self) -> list[tuple[str, str, str]]:
        """Path, blob id before and blob id after of each file that the patch changes."""
        blobs = DIFF.findall(self.text)
        if not blobs or len(blobs) != len(re.findall(r"^diff --git ", self.text, re.M)):
            raise Refused(f"{self.name} may only change files that the release has, and needs their full blob ids")
        return blobs


def check_trailers(patch: Patch) -> None:
    """Refuse a patch with bad or missing trailers."""
    values = {key: value.strip() for key, _, value in (line.partition(":") for line in patch.trailer_lines)}
    if lacking := [key for key in TRAILERS if not values.get(key)]:
        raise Refused(f"{patch.name} lacks the trailer {' and '.join(lacking)}")
    if values["Reason"] not in REASONS:
        raise Refused(f"{patch.name} has Reason: {values['Reason']}; allowed: {', '.join(REASONS)}")
    series = [f"{key}: {value}" for key, value in values.items() if key.lower() == "series"]
    if series != [FIXES] * patch.fixes:
        raise Refused(f"{patch.name} has {series[0]}; allowed: {FIXES}, or no such trailer")


@dataclass(frozen=True)
class Stack:
    """The changes of one apply."""

    release: Release
    patches: tuple[Patch, ...]
    before: Mapping[str, str]  # blob ids of the hooked files in the release, by path
    after: Mapping[str, str]  # the same with the patches
    added: Mapping[str, bytes]  # content of the files copied in, by path
    id: str  # a digest of the patches and of the files copied in
    series: str = ""  # "precision" or "precision and fixes"; empty where the release has only one stack

    def mismatches(self, blobs: Mapping[str, str]) -> list[str]:
        """Return the paths in which a tree with these blobs differs from this release's pristine tree."""
        if not self.before and package_tree_id(blobs) != self.release.tree_before:
            return [f"{self.release.framework.name}/"]
        return self.changed(blobs) + [path for path in self.added if path in blobs]

    @property
    def fixes(self) -> bool:
        return self.series.endswith("fixes")

    @property
    def title(self) -> str:
        return f"stack {self.id}" + (f" ({self.series})" if self.series else "")

    @cached_property
    def copied(self) -> dict[str, str]:
        """The blob ids of the files copied in, by path."""
        return {path: blob_id(content) for path, content in self.added.items()}

    def changed(self, blobs: Mapping[str, str]) -> list[str]:
        """Return the hooked paths whose blobs are not the release's."""
        return [path for path, blob in self.before.items() if blobs.get(path) != blob]

    def unknown(self, blobs: Mapping[str, str]) -> list[str]:
        """Return the hooked paths whose blobs are neither the release's nor the patched ones."""
        return [path for path in self.changed(blobs) if blobs.get(path) != self.after[path]]

    def rest_is_pristine(self, blobs: Mapping[str, str]) -> bool:
        """Return whether the files that the stack does not touch are those of the release's wheel."""
        rest = {path: blob for path, blob in blobs.items() if path not in self.added}
        return package_tree_id({**rest, **self.before}) == self.release.tree_before


def files_below(folder: Path) -> dict[str, Path]:
    """Return the files below ``folder``, by their path in it, without compiled ones."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path for path in files}


def verbatim_files(project: Path = REPO, framework: Framework = VERL, fixes: bool = True) -> dict[str, Path]:
    """Return the files copied into every release, with those of ``fixes`` or without, by their path in the target."""
    home = framework.home(project)
    files = files_below(home / "files") | (files_below(home / "fixes") if fixes else {})
    if framework.overlays:
        overlays = sorted((project / "configs/precision").glob("*.yaml"))
        files |= {f"{framework.overlays}/{path.name}": path for path in overlays}
    return files


def load_stack(release: Release, project: Path = REPO) -> Stack:
    """Return the stack of all patches and files of a release."""
    return release_stacks(release, project)[-1]


def release_stacks(release: Release, project: Path = REPO) -> list[Stack]:
    """Return a release's stack of ``precision`` and that of both series; one stack where nothing is of ``fixes``."""
    folder = release.framework.home(project) / f"v{release.name}"
    series = folder / "series"
    names = series.read_text().split() if series.exists() else []
    undo = f"git -C {folder} checkout . && git -C {folder} clean -f"
    remedy = f"if an export was cut short, repeat it, or undo it: {undo}"
    if unmatched := sorted({path.name for path in folder.glob("*.patch")} ^ set(names)):
        raise Refused(f"{folder} and its series disagree about {', '.join(unmatched)}; {remedy}")
    patches = tuple(Patch(name, (folder / name).read_bytes().decode()) for name in names)
    files = {path: file.read_bytes() for path, file in verbatim_files(project, release.framework).items()}
    own = {path: files[path] for path in verbatim_files(project, release.framework, fixes=False)}
    try:
        count = precision_patches(patches)
        if (count, len(own)) == (len(patches), len(files)):
            return [make_stack(release, patches, files)]
        precision = make_stack(release, patches[:count], own, "precision")
        return [precision, make_stack(release, patches, files, "precision and fixes")]
    except Refused as fault:
        raise Refused(f"{folder}: {fault}; {remedy}") from fault


def precision_patches(patches: Sequence[Patch]) -> int:
    """Return the number of patches of the series ``precision``; refuse one that follows a patch of ``fixes``."""
    count = sum(not patch.fixes for patch in patches)
    if late := [patch.name for patch in patches[count:] if not patch.fixes]:
        (first, *_) = (patch.name for patch in patches if patch.fixes)
        raise Refused(f"{late[0]} follows {first} of the series fixes; the patches without `Series: fixes` come first")
    return count


def make_stack(release: Release, patches: tuple[Patch, ...], added: Mapping[str, bytes], series: str = "") -> Stack:
    """Return the stack of these patches; refuse one that does not start from what the patches before it produce."""
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    for patch in patches:
        for path, old, new in patch.blobs:
            before.setdefault(path, old)
            if after.get(path, old) != old:
                raise Refused(f"{patch.name} does not start from the {path} that the preceding patches produce")
            after[path] = new
    digest = hashlib.sha256()
    for name, content in [*((patch.name, patch.text.encode()) for patch in patches), *added.items()]:
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return Stack(release, patches, before, after, added, digest.hexdigest()[:12], series)


def load_stacks(project: Path = REPO, framework: Framework = VERL) -> list[Stack]:
    """Return the stacks of every release in the framework's versions.toml, as ``release_stacks`` orders them."""
    releases = load_releases(project, framework).values()
    return [stack for release in releases for stack in release_stacks(release, project)]


def whole(stacks: Iterable[Stack]) -> dict[str, Stack]:
    """Return each release's stack of all patches, by the release's name."""
    return {stack.release.name: stack for stack in stacks}  # a release's last stack
