"""The verl that a job would run on, and the config that its ``main_ppo`` would see; nothing of it is imported."""

import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from lib.doctor import dtype_rules as hops
from lib.doctor.dtype_rules import UNKNOWN
from lib.errors import Refused
from lib.patches.git_objects import blob_id
from lib.patches.precision_module import load_precision, precision_file
from lib.patches.record import read_record
from lib.patches.stack import Stack, closest, load_stacks
from lib.patches.status import examine
from lib.patches.target import locked
from lib.patches.wheels import wheel
from lib.paths import CONFIGS

# --- the tree ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """A verl and what is known of it.

    Args:
        root: the folder that holds ``verl/``.
        release: the one whose rules are used: its own, or for a foreign tree the nearest.
        state: patched, unpatched or foreign.
        stack: the id of the stack that it carries.
        files: of each file that a rule names: ``release`` (as the wheel has it), ``patched`` or ``unknown``.
    """

    root: Path
    release: str
    state: str
    stack: str | None
    files: Mapping[str, str]

    @property
    def name(self) -> str:
        if self.state == "foreign":
            return f"this verl (nearest release {self.release})"
        return f"verl {self.release}"

    @property
    def title(self) -> str:
        return f"{self.name}, {'patched' if self.precision else 'unpatched'}"

    @property
    def patching(self) -> str:
        """The command that puts the stack on it."""
        return f"make apply-patches VERL={self.root}"

    @cached_property
    def precision(self) -> ModuleType | None:
        """The tree's own ``verl.utils.precision``; None where it has none. Imports torch."""
        return load_precision(self.root, "precision_of_the_tree") if precision_file(self.root) else None


def look_at(target: Path) -> Tree:
    """Tell which verl ``target`` is; changes nothing.

    Raises:
        Refused: ``target`` is no verl, or a release's wheel to compare it with cannot be had.
    """
    with locked(target) as held:
        blobs, record, stacks = held.blobs(), read_record(held), load_stacks()
        found = examine(held, blobs, record, stacks)
    state = {"pristine": "unpatched", "patched": "patched", "outdated": "patched"}.get(found.state, "foreign")
    by_name = {stack.release.name: stack for stack in stacks}
    stack = by_name[found.release] if found.release else closest(record.undone(blobs) if record else blobs, stacks)
    if state != "foreign" and found.exact:
        hooked = record.replaced if record else {}
        files = {path: "patched" if path in hooked else "release" for path in rule_files()}
    else:
        files = compared(blobs, stack)
    stamp = json.loads(held.stamp.read_text())["stack"] if held.stamp.exists() else None
    return Tree(held.root, stack.release.name, state, stamp, files)


def rule_files() -> list[str]:
    return sorted({f"verl/{rule.path}" for rule in hops.RULES})


def compared(blobs: Mapping[str, str], stack: Stack) -> dict[str, str]:
    """What each file of the rules is, by its content: the release's, the patched release's, or unknown."""
    with zipfile.ZipFile(wheel(stack.release.name)) as pristine:
        there = set(pristine.namelist())
        known = {path: blob_id(pristine.read(path)) for path in rule_files() if path in there}
    files = {}
    for path in rule_files():
        blob = blobs.get(path)
        after = stack.after.get(path) if blob != known.get(path) else None
        files[path] = "release" if blob == known.get(path) else "patched" if blob == after else UNKNOWN
    return files


# --- the config -------------------------------------------------------------------------------------------------------


class Uncomposable(Exception):
    """The overrides do not compose; the message is the line with which verl's start would end."""


@dataclass(frozen=True)
class Config:
    """The composed configuration as plain dictionaries, and the keys that the user set, by override or overlay."""

    values: Mapping[str, Any]
    given: frozenset[str]
    words: frozenset[str] = frozenset()  # those that ``+`` made at the root of the config, where nothing reads them

    def get(self, path: str, default: Any = None) -> Any:
        """What a dotted path leads to; ``default`` where it leads nowhere, to null or to ``???``, to be set."""
        found = select(self.values, path)
        return default if found in (None, "???") else found

    def has(self, path: str) -> bool:
        return select(self.values, path) is not None

    def user(self, path: str) -> bool:
        return path in self.given


def select(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def leaves(values: Any, path: str = "") -> Iterator[str]:
    """The dotted paths of all that is no dictionary."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path


def compose(root: Path, overrides: list[str], config_name: str = "ppo_trainer") -> Config:
    """Compose the tree's own ``trainer/config`` with ``overrides``, as its ``main_ppo`` would.

    This repository's groups are on the search path where an override names one of them and none gives a path itself.

    Raises:
        Refused: the words are no overrides at all, or there is no such config.
        Uncomposable: they do not fit this verl's configuration.
    """
    import hydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    folder = root / "verl/trainer/config"
    if not (folder / f"{config_name}.yaml").exists():
        raise Refused(f"--config-name={config_name}: {folder} has no {config_name}.yaml")
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise Refused(f"ARGS: {one_line(error)}: give key=value words, as main_ppo takes them") from error
    ours = {group.name for group in CONFIGS.iterdir()} - {"precision"}
    words = list(overrides)
    paths = [path for each in parsed if each.key_or_group == "hydra.searchpath" for path in each.value()]
    if not paths and any(each.key_or_group in ours for each in parsed):
        paths = [f"file://{CONFIGS}"]
        words.append(f"hydra.searchpath=['{paths[0]}']")
    folders = [folder, *(Path(path.removeprefix("file://")) for path in paths)]
    try:
        with hydra.initialize_config_dir(config_dir=str(folder.resolve()), version_base=None):
            config = hydra.compose(config_name, overrides=words)
            files = overlays(parsed, words, config_name, folders)
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise Uncomposable(one_line(error)) from error
    given = {path for file in files for path in leaves(file)}
    for each in parsed:
        if not each.is_delete() and not each.key_or_group.startswith("hydra"):
            given |= set(leaves(each.value(), each.key_or_group))
    added = {each.key_or_group for each in parsed if each.is_add() or each.is_force_add()}
    groups = {word for word in added if any((each / word).is_dir() for each in folders)}
    values = OmegaConf.to_container(config)
    words = {word for word in added - groups if not isinstance(values.get(word, {}), Mapping)}
    return Config(values, frozenset(given), frozenset(words))


def overlays(parsed: list, words: list[str], config_name: str, folders: list[Path]) -> list[dict]:
    """The contents, each below its package, of the files that ``+group=name`` overrides bring into the config."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    groups = {each.key_or_group for each in parsed if each.is_add()}
    groups = {group for group in groups if any((folder / group).is_dir() for folder in folders)}
    if not groups:
        return []
    found, brought = [], set()
    for each in GlobalHydra.instance().config_loader().compute_defaults_list(config_name, words, RunMode.RUN).defaults:
        path = each.config_path or ""
        if path.rpartition("/")[0] in groups or each.parent in brought:
            brought.add(path)
            file = next(folder / f"{path}.yaml" for folder in folders if (folder / f"{path}.yaml").exists())
            content = {
                key: value for key, value in OmegaConf.to_container(OmegaConf.load(file)).items() if key != "defaults"
            }
            for key in reversed([part for part in (each.package or "").split(".") if part]):
                content = {key: content}
            found.append(content)
    return found


def one_line(error: BaseException) -> str:
    """The first line, and what else could have been chosen where Hydra says it.

    Not its advice to append the key with ``+``, which would make it one that nothing reads.
    """
    first, _, rest = str(error).partition("\n")
    options = rest.partition("Available options in ")[2].partition("Config search path")[0].split()
    return " ".join(first.split()) + (f"; there are {', '.join(options[1:])}" if options else "")
