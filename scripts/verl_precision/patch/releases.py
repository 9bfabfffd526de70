"""Load the releases that have a stack from each framework's versions.toml, and write their entries."""

import json
import re
from configparser import ConfigParser
from dataclasses import asdict, dataclass, field
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.files import replace_files
from verl_precision.paths import REPO


@dataclass(frozen=True)
class Framework:
    """A package that has stacks: those of ``name`` are in patches/<name>, and its make variable is <NAME>.

    Paths are relative to the folder that contains the package.
    """

    name: str
    distribution: str  # its name on PyPI
    version_file: str
    overlays: str | None = None  # where apply copies configs/precision, if the framework reads such files
    features: tuple[str, ...] = ()  # the words that versions.toml may list as a release's features, and explains

    @property
    def stamp(self) -> str:
        return f"{self.name}/utils/precision_stamp.json"  # apply leaves it, and workers report it

    @property
    def bookkeeping(self) -> str:
        return f"{self.name}/.precision"  # a folder with the record of apply and the original files

    @property
    def staging(self) -> str:
        return f"{self.bookkeeping}.new"  # apply fills it, then renames it to ``bookkeeping``

    def home(self, project: Path) -> Path:
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
        *("trainer_registry", "platforms", "bypass_mode"),
    ),
)
OAT = Framework("oat", "oat-llm", "oat/__about__.py", features=("importance_sampling",))
FRAMEWORKS = {framework.name: framework for framework in (VERL, OAT)}


@dataclass(frozen=True)
class Release:
    """One entry of a framework's versions.toml.

    ``tree_before`` is the git tree id of the package as the wheel ships it, ``tree_after`` the same with the hooks of
    the series ``precision``, and ``tree_after_fixes`` with those of ``fixes``, too, if it has any. The files that are
    copied in do not count, so that editing them changes no release's entry. ``features`` are what code asks of a
    release, in words that versions.toml explains. ``ported_from`` is the release whose stack was ported to this one:
    tables without an entry for this release use that release's.
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
    tree_after_fixes: str = ""

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

    Its names and values are JSON as well as TOML: this has to run on Python 3.10, which has no tomllib.
    """
    versions = ConfigParser(interpolation=None, delimiters="=", comment_prefixes="#")
    versions.read_string((framework.home(project) / "versions.toml").read_text())
    releases = {}
    for section in versions.sections():
        name, values = json.loads(section), versions[section].items()
        releases[name] = Release(framework, name, **{key: json.loads(value) for key, value in values})
    return releases


def find_release(name: str, project: Path = REPO, framework: Framework = VERL) -> Release:
    """Return the release called ``name``, which versions.toml must have."""
    releases = load_releases(project, framework)
    if name not in releases:
        raise Refused(f"unknown {framework.name} release {name!r}; known: {', '.join(releases)}")
    return releases[name]


def with_trees_after(release: Release, tree: str, fixed: str, versions: str) -> str:
    """Return the text of a versions.toml with the release's tree_after and tree_after_fixes, without that if empty."""
    name, old = re.escape(release.name), r'"[^"\n]*"(\ntree_after_fixes = "[^"\n]*")?$'
    entry = re.compile(rf'(^\["{name}"\]$(?:\n(?!\[).*)*?\ntree_after = ){old}', re.M)
    new = f'"{tree}"' + (f'\ntree_after_fixes = "{fixed}"' if fixed else "")
    text, count = entry.subn(rf"\g<1>{new}", versions)
    if count != 1:
        raise Refused(f'versions.toml of {release.framework.name} has no tree_after under ["{release.name}"]')
    return text


def add_release(release: Release, versions: Path) -> str:
    """Append the release's entry to versions.toml and return it, without ``tree_after_fixes``, which export adds."""
    left_out = ("framework", "name", "tree_after_fixes")
    values = {key: value for key, value in asdict(release).items() if key not in left_out}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    entry = "\n".join([f"[{json.dumps(release.name)}]", *lines])
    replace_files({versions: f"{versions.read_text()}\n{entry}\n".encode()}, versions.parent)
    return entry
