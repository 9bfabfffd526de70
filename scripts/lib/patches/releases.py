"""Which release is this? Those of each framework that have a stack, their wheels, and the git ids that tell them."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lib.errors import Refused
from lib.paths import REPO


@dataclass(frozen=True)
class Framework:
    """A package that has stacks; those of ``name`` are in patches/<name>, and its make variable is <NAME>.

    ``name`` is that of the package, ``distribution`` its name on PyPI, ``version`` the file that tells its version.
    ``overlays`` is where apply puts configs/precision, for a framework that reads such files. ``features`` are the
    words that versions.toml may list as a release's features, and explains.
    """

    name: str
    distribution: str
    version: str
    overlays: str | None = None
    features: tuple[str, ...] = ()

    @property
    def stamp(self) -> str:
        """Where apply leaves the stamp that workers report."""
        return f"{self.name}/utils/precision_stamp.json"

    @property
    def book(self) -> str:
        """Where apply keeps its own books."""
        return f"{self.name}/.precision"

    def home(self, project: Path) -> Path:
        """Return the folder of its stacks."""
        return project / "patches" / self.name


VERL = Framework(
    "verl",
    "verl",
    "verl/version/version",
    overlays="verl/trainer/config/precision",
    features=(
        *("legacy_workers", "engine_critic", "engine_critic_fails", "engine_policy", "engine_dtype"),
        *("hf_rollout", "sync_rollout", "server_engine_kwargs", "sharding_manager", "bfloat16_wire"),
        *("lora_adapter_path", "reward_worker", "reward_loop", "sft_trainer", "validate_config"),
        *("trainer_registry", "platforms"),
    ),
)
OAT = Framework("oat", "oat-llm", "oat/__about__.py", features=("importance_sampling",))
FRAMEWORKS = {framework.name: framework for framework in (VERL, OAT)}


@dataclass(frozen=True)
class Release:
    """One entry of a framework's versions.toml.

    ``tree_before`` is the git tree id of the package as the wheel ships it, ``tree_after`` the same with the hooks of
    the series. The files that are copied in verbatim do not count, so that editing them changes no release's entry.
    ``features`` are what code asks of a release, in words that versions.toml explains. ``ported_from`` is the release
    whose stack was carried to this one: what a table knows of that one holds until the table has this one too.

    Raises:
        Refused: a feature is not among the framework's.
    """

    framework: Framework
    name: str
    wheel_sha256: str
    tree_before: str
    tree_after: str
    family: str
    dependencies: list[str]
    features: list[str] = field(default_factory=list)
    ported_from: str = ""

    def __post_init__(self):
        for feature in self.features:
            self.has(feature)

    def has(self, feature: str) -> bool:
        """Report whether the release has a feature; raises Refused where its framework knows no such word."""
        if feature not in self.framework.features:
            known = ", ".join(self.framework.features)
            raise Refused(f"{self}: unknown feature {feature!r} in versions.toml; known: {known}")
        return feature in self.features

    def __str__(self) -> str:
        return f"{self.framework.name} {self.name}"


def load_releases(project: Path = REPO, framework: Framework = VERL) -> dict[str, Release]:
    """Return the releases of the framework's versions.toml by name, in file order.

    Its names and values are valid JSON as well as TOML: Python 3.10, which OAT runs on, has no tomllib.
    """
    versions = ConfigParser(interpolation=None, delimiters="=", comment_prefixes="#")
    versions.read_string((framework.home(project) / "versions.toml").read_text())
    releases = {}
    for section in versions.sections():
        name, values = json.loads(section), versions[section].items()
        releases[name] = Release(framework, name, **{key: json.loads(value) for key, value in values})
    return releases


def find_release(name: str, project: Path = REPO, framework: Framework = VERL) -> Release:
    """Return the release called ``name``; raises Refused with the known names where there is none."""
    releases = load_releases(project, framework)
    if name not in releases:
        known = f"known: {', '.join(releases)}; make port carries a stack to others"
        raise Refused(f"unknown {framework.name} release {name!r}; {known}")
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
    values = {key: value for key, value in asdict(release).items() if key not in ("framework", "name")}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
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


def package_tree_id(blobs: Mapping[str, str]) -> str:
    """Return the tree id of a package from blob ids by path, each path starting with the package's name."""
    return tree_id({path.partition("/")[2]: blob for path, blob in blobs.items()})


def package_files(root: Path, framework: Framework = VERL) -> Iterator[str]:
    """Yield the path of each file of the package below ``root``, compiled files and this tool's own left out."""
    for folder, subfolders, names in os.walk(root / framework.name):
        here = Path(folder).relative_to(root).as_posix()
        subfolders[:] = [name for name in subfolders if name != "__pycache__" and f"{here}/{name}" != framework.book]
        for name in names:
            path = f"{here}/{name}"
            if path != framework.stamp and not name.endswith(".pyc"):
                yield path


def package_blobs(root: Path, framework: Framework = VERL) -> dict[str, str]:
    """Return the blob id of each file of the package below ``root``, by path."""
    return {path: blob_id((root / path).read_bytes()) for path in package_files(root, framework)}


def wheel(release: str, framework: Framework = VERL) -> Path:
    """Return the release's wheel, whose sha256 is checked."""
    known, path = find_release(release, framework=framework), download(release, framework)
    if (found := sha256(path)) != known.wheel_sha256:
        raise Refused(f"{path} has sha256 {found}, not {known.wheel_sha256} as versions.toml says; delete it")
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def download(release: str, framework: Framework = VERL) -> Path:
    """Return the release's wheel in .cache/wheels, downloaded with pip where it is not there.

    It is read here, not run, so that the Python that its metadata asks for need not be this one.
    """
    folder = REPO / ".cache/wheels"
    cached = next(folder.glob(f"{framework.distribution.replace('-', '_')}-{release}-*.whl"), None)
    if not cached:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            pip += ["--ignore-requires-python", "--dest", scratch, f"{framework.distribution}=={release}"]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1:]
                raise Refused(f"cannot download the wheel of {framework.distribution} {release}: {' '.join(reason)}")
            downloaded = next(Path(scratch).iterdir())
            cached = folder / downloaded.name
            os.replace(downloaded, cached)
    return cached


def unpacked_wheel(release: str, into: Path, framework: Framework = VERL) -> Path:
    """Unpack the release's pristine wheel into the folder ``into`` and return that folder, which holds the package."""
    return unpack(wheel(release, framework), into)


def unpack(archive: Path, into: Path) -> Path:
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(into)
    return into
