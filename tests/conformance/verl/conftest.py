"""Every release, as its wheel ships it and with its series `precision`, run through ``cases.py`` by its own workers."""

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from behaviours import BEHAVIOURS
from support import selected
from support.conformance import Outcomes, Suite
from support.fork_server import ForkServer
from support.recorded import RECORDINGS
from support.trees import patched_tree

from verl_precision.patch.releases import VERL, find_release
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.paths import REPO

FOLDER = Path(__file__).parent
SUITE = Suite(RECORDINGS[VERL], BEHAVIOURS)
PYTHON = REPO / ".venv-workers/bin/python"
# What every release's workers import, except verl itself.
PRELOAD = (
    *("torch.distributed._tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.profiler"),
    *("transformers.models.auto.modeling_auto", "transformers.models.qwen2.modeling_qwen2", "peft", "accelerate"),
    *("transformers.trainer_pt_utils", "tensordict", "torchdata.stateful_dataloader", "pandas", "datasets", "hydra"),
    *("ray.util.collective", "codetiming", "fastapi", "uvicorn", "aiohttp", "cachetools", "zmq", "openai"),
)


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items):
    selected.mark(SUITE.recording, items)


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[ForkServer]:
    """The process from which workers are forked."""
    with ForkServer(PRELOAD, tmp_path_factory.mktemp("fork-server") / "server.log", PYTHON) as started:
        yield started


@pytest.fixture(scope="session")
def model(server, tmp_path_factory) -> Path:
    """The sanity task's model, saved by the transformers that the releases will load it with."""
    folder = tmp_path_factory.mktemp("model")
    server.check([FOLDER / "make_model.py", folder], {**os.environ, "PYTHONPATH": str(REPO)}, folder, ranks=1)
    return folder


@pytest.fixture(scope="session")
def tree_of(tmp_path_factory, pytestconfig) -> Callable[..., Path]:
    """``tree_of(release, patched, fixes=False)``: a folder that contains that ``verl/``."""

    @functools.cache
    def of(release: str, patched: bool, fixes: bool = False) -> Path:
        folder = tmp_path_factory.mktemp(f"{release}-{'patched' if patched else 'upstream'}")
        if not patched:
            return unpacked_wheel(release, folder)
        return patched_tree(release, folder, pytestconfig.getoption("verl_tree"), fixes=fixes)

    return of


@pytest.fixture(scope="session")
def run_workers(server, model, tree_of, tmp_path_factory) -> Callable[..., list]:
    """``run_workers(script, release, patched, *names, ranks=2, fixes=False)``: what each rank of a script wrote.

    The script is called with RELEASE MODEL_DIR OUT_DIR [CASE ...], and rank r writes OUT_DIR/rank_r.json.
    """
    begun: set[tuple[str, str, bool, bool]] = set()

    def run(script: str, release: str, patched: bool, *names: str, ranks: int = 2, fixes: bool = False) -> list:
        this = (script, release, patched, fixes)
        assert this not in begun, "they did not run: the first of these tests shows why"
        begun.add(this)
        lock = "requirements/workers.lock"
        assert "workers" in find_release(release).dependencies, f"verl {release} does not run with {lock}"
        variables = {
            **os.environ,
            "PYTHONPATH": f"{tree_of(release, patched, fixes)}:{REPO}:{REPO / 'scripts'}:{REPO / 'tests'}",
            "OMP_NUM_THREADS": "1",
            "VERL_PLATFORM": "cpu",  # this and the next are read only by verl 0.9
            "VERL_ENGINE_DEVICE": "cuda",
        }
        out = tmp_path_factory.mktemp(f"{release}-outcomes")
        server.check([FOLDER / script, release, model, out, *names], variables, out, ranks=ranks)
        return [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(ranks)]

    return run


@pytest.fixture(scope="session")
def outcomes(run_workers, request) -> Iterator[Outcomes]:
    """The outcomes of each tree by case, on which both ranks agree."""

    def run(release: str, patched: bool, *cases: str) -> dict[str, str]:
        seen: dict[str, str] = {}
        for fixes in (False, True):
            if names := [case for case in cases if (patched and BEHAVIOURS[case].fixes) == fixes]:
                first, second = run_workers("cases.py", release, patched, *names, fixes=fixes)
                assert first == second, f"the ranks differ\n{first}\n{second}"
                seen |= first
        return seen

    yield from SUITE.outcomes(request, run)
