"""Compose a Hydra configuration from the yaml files of a verl, which need not be installed.

Hydra is imported where it is used: this module needs only the standard library to be imported.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydra.core.default_element import ResultDefault
    from omegaconf import DictConfig


class Uncomposable(Exception):
    """Overrides that do not fit a configuration; the message is the reason in one line.

    It leaves out Hydra's advice to append the key with ``+``, which would make it a key that nothing reads.
    """

    def __init__(self, error: Exception):
        first, _, rest = str(error).partition("\n")
        options = rest.partition("Available options in ")[2].partition("Config search path")[0].split()
        super().__init__(" ".join(first.split()) + (f"; there are {', '.join(options[1:])}" if options else ""))


def compose_config(folder: Path, overrides: Sequence[str], config_name: str = "ppo_trainer") -> "DictConfig":
    """Return ``config_name`` of the folder of verl's configs with ``overrides``, resolved."""
    import hydra
    from omegaconf import OmegaConf

    with hydra_in(folder):
        config = hydra.compose(config_name, overrides=list(overrides))
        OmegaConf.resolve(config)
    return config


def compose_defaults(folder: Path, overrides: Sequence[str], config_name: str = "ppo_trainer") -> "list[ResultDefault]":
    """Return the files that make up the configuration, in the order in which they are merged."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    with hydra_in(folder):
        loader = GlobalHydra.instance().config_loader()
        return loader.compute_defaults_list(config_name, list(overrides), RunMode.RUN).defaults


@contextmanager
def hydra_in(folder: Path) -> Iterator[None]:
    """Initialize Hydra with ``folder`` as its primary config directory; its errors inside become Uncomposable."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with hydra.initialize_config_dir(config_dir=str(folder.resolve()), version_base=None):
            yield
    except (HydraException, OmegaConfBaseException) as error:
        raise Uncomposable(error) from error
