"""Compose the configuration of a verl's ``main_ppo``, and record which of its keys the user set."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_precision.errors import Refused
from verl_precision.facts.compose import Uncomposable, compose_config, compose_defaults
from verl_precision.paths import CONFIGS


@dataclass(frozen=True)
class JobConfig:
    """A composed configuration, as plain dictionaries, and the dotted keys that the user set.

    Args:
        user_keys: those set by an override or by the file of a group.
        added_keys: those of them that ``+`` added.
    """

    values: Mapping[str, Any]
    user_keys: frozenset[str]
    added_keys: frozenset[str]

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path; ``default`` where it is absent, null, or ``???``, which must be set."""
        value = self.values
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return default if value in (None, "???") else value

    def has(self, path: str) -> bool:
        return self.get(path) is not None

    def user_values(self, *keys: str) -> dict[str, Any]:
        """Return the values of those of the keys that the user set."""
        return {key: self.get(key) for key in keys if key in self.user_keys}


def leaves(values: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted paths of all values except dictionaries that are not empty."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path


def load_config(root: Path, overrides: Sequence[str], config_name: str = "ppo_trainer") -> JobConfig:
    """Compose the configs of the verl in ``root`` with ``overrides``, as its ``main_ppo`` would.

    ``config_name`` may be that of an experimental trainer. This repository's groups are on Hydra's search path where an
    override names one of them and none sets that path.

    Raises:
        Refused: the words are no overrides, or there is no such config.
        Uncomposable: the overrides do not fit this verl's configuration.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    main = root / "verl/trainer/config"
    homes = [main, *sorted(root.glob("verl/experimental/*/config"))]
    folder = next((each for each in homes if (each / f"{config_name}.yaml").exists()), None)
    if folder is None:
        raise Refused(f"--config-name={config_name}: {main} has no {config_name}.yaml")
    words = list(overrides)
    try:
        parsed = OverridesParser.create().parse_overrides(words)
    except HydraException as error:
        raise Refused(f"ARGS: {Uncomposable(error)}; give overrides of main_ppo: key=value") from error
    own_groups = {group.name for group in CONFIGS.iterdir()} - {"precision"}
    search_path = [path for each in parsed if each.key_or_group == "hydra.searchpath" for path in each.value()]
    if not search_path:
        search_path = [f"file://{main}"] if folder != main else []
        search_path += [f"file://{CONFIGS}"] if any(each.key_or_group in own_groups for each in parsed) else []
        words.append(f"hydra.searchpath={search_path}")
    values = OmegaConf.to_container(compose_config(folder, words, config_name))
    folders = [folder, *(Path(path.removeprefix("file://")) for path in search_path)]
    added = {each.key_or_group for each in parsed if each.is_add() or each.is_force_add()}
    groups = {name for name in added if any((each / name).is_dir() for each in folders)}
    user_keys = group_keys(groups, words, config_name, folders) if groups else set()
    for each in parsed:
        if not each.is_delete() and not each.key_or_group.startswith("hydra"):
            user_keys |= set(leaves(each.value(), each.key_or_group))
    return JobConfig(values, frozenset(user_keys), frozenset(added - groups))


def group_keys(groups: set[str], words: Sequence[str], config_name: str, folders: Sequence[Path]) -> set[str]:
    """Return the keys that the files of these groups, and the files that those include, set; ``folders`` has them."""
    from omegaconf import OmegaConf

    keys, included = set(), set()
    for each in compose_defaults(folders[0], words, config_name):
        path = each.config_path or ""
        if path.rpartition("/")[0] in groups or each.parent in included:
            included.add(path)
            file = next(folder / f"{path}.yaml" for folder in folders if (folder / f"{path}.yaml").exists())
            content = OmegaConf.to_container(OmegaConf.load(file))
            content.pop("defaults", None)
            keys |= set(leaves(content, each.package or ""))
    return keys
