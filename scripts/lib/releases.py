"""Which verl is this? The releases that have a stack, their wheels, and the git ids that tell a tree's release."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]

# What apply leaves in a target beside verl's own files: the stamp that workers report, and its own bookkeeping.
STAMP = "verl/utils/precision_stamp.json"
BOOK = "verl/.precision"


class Refused(Exception):
    """The request cannot be done; the message is one line that says why and what to do."""


@dataclass(frozen=True)
class Release:
    """One entry of patches/verl/versions.toml.

    ``tree_before`` is the git tree id of verl/ as the wheel ships it, ``tree_after`` the same with the hooks of the
    series. The files that are copied in verbatim do not count, so that editing them changes no release's entry.
    """

    name: str
    wheel_sha256: str
    tree_before: str
    tree_after: str
    family: str
    dependencies: list[str]


def load_releases(project: Path = PROJECT) -> dict[str, Release]:
    """Return the releases of versions.toml by name, in file order."""
    entries = tomllib.loads((project / "patches/verl/versions.toml").read_text())
    return {name: Release(name, **entry) for name, entry in entries.items()}


def find_release(name: str, project: Path = PROJECT) -> Release:
    """Return the release called ``name``; raises Refused with the known names where there is none."""
    releases = load_releases(project)
    if name not in releases:
        raise Refused(f"unknown verl release {name!r}; known: {', '.join(releases)}")
    return releases[name]


def record_tree_after(release: Release, tree: str, versions: Path) -> None:
    """Write ``tree`` as the release's tree_after into versions.toml, leaving the rest as it is."""
    entry = re.compile(rf'(^\["{re.escape(release.name)}"\]$.*?^tree_after = )"[^"\n]*"', re.M | re.S)
    text, count = entry.subn(rf'\g<1>"{tree}"', versions.read_text())
    if count != 1:
        raise Refused(f'{versions} has no tree_after under ["{release.name}"]')
    versions.write_text(text)


def add_release(release: Release, versions: Path) -> str:
    """Append the release's entry to versions.toml and return it."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in asdict(release).items() if key != "name"]
    entry = "\n".join([f"[{json.dumps(release.name)}]", *lines])
    versions.write_text(f"{versions.read_text()}\n{entry}\n")
    return entry


def blob_id(content: bytes) -> str:
    """Return the id that git gives a file of this content."""
    return _object_id("blob", content)


def _object_id(kind: str, content: bytes) -> str:
    return hashlib.sha1(b"%s %d\0" % (kind.encode(), len(content)) + content, usedforsecurity=False).hexdigest()


def tree_id(blobs: Mapping[str, str]) -> str:
    """Return the id that git gives a tree of plain files, from their blob ids by path relative to that tree."""
    entries: dict[str, str] = {}
    folders: dict[str, dict[str, str]] = {}
    for path, blob in blobs.items():
        head, _, rest = path.partition("/")
        if rest:
            folders.setdefault(head, {})[rest] = blob
        else:
            entries[head] = "100644 " + blob
    entries |= {name: "40000 " + tree_id(inside) for name, inside in folders.items()}
    content = b""
    # git sorts a folder as if its name ended in a slash
    for name in sorted(entries, key=lambda name: name + "/" if name in folders else name):
        mode, _, blob = entries[name].partition(" ")
        content += f"{mode} {name}\0".encode() + bytes.fromhex(blob)
    return _object_id("tree", content)


def verl_tree_id(blobs: Mapping[str, str]) -> str:
    """Return the tree id of verl/ from blob ids by path, each path starting with ``verl/``."""
    return tree_id({path.removeprefix("verl/"): blob for path, blob in blobs.items()})


def verl_files(root: Path) -> Iterator[str]:
    """Yield the path of each file in verl/ below ``root``, compiled files and this tool's bookkeeping left out."""
    for folder, subfolders, names in os.walk(root / "verl"):
        here = Path(folder).relative_to(root).as_posix()
        subfolders[:] = [name for name in subfolders if name != "__pycache__" and f"{here}/{name}" != BOOK]
        for name in names:
            path = f"{here}/{name}"
            if path != STAMP and not name.endswith(".pyc"):
                yield path


def verl_blobs(root: Path) -> dict[str, str]:
    """Return the blob id of each file in verl/ below ``root``, by path."""
    return {path: blob_id((root / path).read_bytes()) for path in verl_files(root)}


def wheel(release: str) -> Path:
    """Return the release's wheel, whose sha256 is checked."""
    known, path = find_release(release), download(release)
    if (found := sha256(path)) != known.wheel_sha256:
        raise Refused(f"{path} has sha256 {found}, not {known.wheel_sha256} as versions.toml says; delete it")
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def download(release: str) -> Path:
    """Return the release's wheel in .cache/wheels, downloaded with pip where it is not there."""
    folder = PROJECT / ".cache/wheels"
    cached = next(folder.glob(f"verl-{release}-*.whl"), None)
    if not cached:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            done = subprocess.run([*pip, "--dest", scratch, f"verl=={release}"], capture_output=True, text=True)
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1:]
                raise Refused(f"cannot download the wheel of verl {release}: {' '.join(reason)}")
            downloaded = next(Path(scratch).iterdir())
            cached = folder / downloaded.name
            os.replace(downloaded, cached)
    return cached


def unpacked_wheel(release: str, into: Path) -> Path:
    """Unpack the release's pristine wheel into the folder ``into`` and return that folder, which then holds verl/."""
    return unpack(wheel(release), into)


def unpack(archive: Path, into: Path) -> Path:
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(into)
    return into
