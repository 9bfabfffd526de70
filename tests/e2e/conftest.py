"""The job that trains beside the first modules' tests, whose processes mostly wait for one another."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import kill
from small_runs import FLOWRL, FLOWRL_STEPS, Run, start_run
from support.waiting import TIMEOUT_S

from verl_precision.paths import ARITHMETIC, REPO


@pytest.fixture(scope="session")
def generated() -> Path:
    """The folder of the sanity task's model and data, generated if missing."""
    prepare = [sys.executable, "-m", "recipes.arithmetic.prepare", "--task", "addition", "--out", ARITHMETIC]
    subprocess.run([*prepare, "--seed", "1"], cwd=REPO, check=True)
    return ARITHMETIC


@pytest.fixture(scope="session")
def flowrl(generated, tmp_path_factory) -> Iterator[Run]:
    """FlowRL on the sanity task: a job that records its rollouts and writes its answers to ``dumps``."""
    folder = tmp_path_factory.mktemp("flowrl")
    records = f"+rollouts=record rollouts.file={folder}/rollouts.sqlite trainer.rollout_data_dir={folder}/dumps"
    run = start_run(folder / "whole", FLOWRL_STEPS, [*FLOWRL, records], "RECIPE=flowrl")
    yield run
    run.process.kill()
    kill(run.processes)


@pytest.fixture(scope="session", autouse=True)
def background(request) -> Run | None:
    """FlowRL's job, started before the first test, if it is to be tested.

    Verl's weight sync names its socket after Ray's job, the first in every separate cluster: no second job may sync
    weights until this one has ended.
    """
    tested = any("flowrl" in getattr(item, "fixturenames", ()) for item in request.session.items)
    return request.getfixturevalue("flowrl") if tested else None


@pytest.fixture(scope="session")
def exclusive(background) -> None:
    """Wait for the end of the job in the background."""
    if background:
        background.process.wait(TIMEOUT_S)
