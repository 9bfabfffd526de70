"""Parse the files of verl's configs once: Hydra parses all of them for each config, half of whose time that takes."""

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TextIO
from unittest import mock

from omegaconf import DictConfig, OmegaConf

LOAD = OmegaConf.load


@cache
def parsed(text: str) -> DictConfig:
    return LOAD(io.StringIO(text))


def load(file: str | Path | TextIO) -> DictConfig:
    """Return what ``OmegaConf.load`` does; the same text is parsed once."""
    text = file.read() if hasattr(file, "read") else Path(file).read_text()
    return copy.deepcopy(parsed(text))


@contextmanager
def yaml_parsed_once() -> Iterator[None]:
    """Parse each yaml file once in this process, inside."""
    with mock.patch.object(OmegaConf, "load", load):
        yield
