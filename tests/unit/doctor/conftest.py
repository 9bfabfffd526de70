"""Diagnoses of each release, patched and not."""

from functools import cache

import pytest
from support.diagnoses import Examine
from support.parsed_once import yaml_parsed_once

from lib.doctor import refusals
from lib.doctor.diagnosis import Diagnosis, diagnose
from lib.doctor.tree import identify_tree
from lib.patches.apply import apply
from lib.patches.wheels import unpacked_wheel


@pytest.fixture(scope="session")
def examine(tmp_path_factory: pytest.TempPathFactory) -> Examine:
    """``examine(release, "patched" | "unpatched", *overrides)``: the diagnosis; each tree is created once.

    So are its files parsed, which a diagnosis spends most of its time on.
    """
    made = {}
    classes = cache(refusals.config_classes)

    def of(release: str, state: str, *overrides: str, config_name: str = "ppo_trainer") -> Diagnosis:
        if (release, state) not in made:
            root = unpacked_wheel(release, tmp_path_factory.mktemp(f"{release}-{state}"))
            if state == "patched":
                apply(root)
            made[release, state] = identify_tree(root)
        with yaml_parsed_once() as patch:
            patch.setattr(refusals, "config_classes", classes)
            return diagnose(made[release, state], list(overrides), config_name)

    return of
