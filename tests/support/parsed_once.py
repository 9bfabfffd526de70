"""Parse the files of verl's configs and their interpolations once: Hydra parses all of them for each config."""

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TextIO
from unittest import mock

from omegaconf import DictConfig, OmegaConf, base

LOAD, PARSE = OmegaConf.load, cache(base.parse)


@cache
def parsed(text: str) -> bytes:
    return pickle.dumps(LOAD(io.StringIO(text)))


def load(file: str | Path | TextIO) -> DictConfig:
    """Return what ``OmegaConf.load`` does; the same text is parsed once."""
    text = file.read() if hasattr(file, "read") else Path(file).read_text()
    return pickle.loads(parsed(text))  # faster than a deep copy


@contextmanager
def yaml_parsed_once() -> Iterator[None]:
    """Parse each yaml file and interpolation once in this process, inside."""
    with mock.patch.object(OmegaConf, "load", load), mock.patch.object(base, "parse", PARSE):
        yield
