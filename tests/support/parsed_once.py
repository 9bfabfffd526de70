"""Parse the files of verl's configs once: Hydra parses all of them for each config, half of whose time that takes."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
from omegaconf import OmegaConf

LOADED = cache(OmegaConf.load)


@contextmanager
def yaml_parsed_once() -> Iterator[pytest.MonkeyPatch]:
    """Load each yaml file once in this process, inside; files that a test changes must be loaded outside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", lambda file: copy.deepcopy(LOADED(str(file))))
        yield patch
