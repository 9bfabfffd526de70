"""Every release, as its wheel ships it and with its stack, run once through ``cases.py`` by its own workers."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from behaviours import BEHAVIOURS
from support.conformance import IDENTICAL, Outcomes, verdicts, write_results
from support.fork_server import ForkServer
from support.recorded import UpstreamOutcomes, mark_recorded
from support.trees import patched_tree
from verl_releases import RELEASES

from lib.patches.releases import VERL, find_release
from lib.patches.wheels import unpacked_wheel
from lib.paths import REPO

RESULTS = REPO / "tests/expected/releases.json"
UPSTREAM = REPO / "tests/expected/releases-upstream.json"
SUITE = Path(__file__).parent
PYTHON = REPO / ".venv-workers/bin/python"
# Cases whose outcome depends on the CPU: an unpatched tree always runs them.
DIGESTS = {case for case, behaviour in BEHAVIOURS.items() if behaviour.patched == IDENTICAL}
# What every release's workers import, except verl itself.
PRELOAD = (
    *("torch.distributed._tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.profiler"),
    *("transformers.models.auto.modeling_auto", "transformers.models.qwen2.modeling_qwen2", "peft", "accelerate"),
    *("transformers.trainer_pt_utils", "tensordict", "torchdata.stateful_dataloader", "pandas", "datasets", "hydra"),
    *("ray.util.collective", "codetiming", "fastapi", "uvicorn", "aiohttp", "cachetools", "zmq", "openai"),
)


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items):
    mark_recorded(items, VERL, RESULTS, SUITE)


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[ForkServer]:
    """The process from which workers are forked."""
    with ForkServer(PRELOAD, tmp_path_factory.mktemp("fork-server") / "server.log", PYTHON) as started:
        yield started


@pytest.fixture(scope="session")
def model(server, tmp_path_factory) -> Path:
    """The sanity task's model, saved by the transformers that the releases will load it with."""
    folder = tmp_path_factory.mktemp("model")
    server.check([SUITE / "make_model.py", folder], {**os.environ, "PYTHONPATH": str(REPO)}, folder, ranks=1)
    return folder


@pytest.fixture(scope="session")
def tree_of(tmp_path_factory, pytestconfig) -> Callable[[str, bool], Path]:
    """``tree_of(release, patched)``: a folder that contains that ``verl/``."""
    done: dict[tuple[str, bool], Path] = {}

    def of(release: str, patched: bool) -> Path:
        if (release, patched) not in done:
            folder = tmp_path_factory.mktemp(f"{release}-{'patched' if patched else 'upstream'}")
            given = pytestconfig.getoption("verl_tree")
            tree = patched_tree(release, folder, given) if patched else unpacked_wheel(release, folder)
            done[release, patched] = tree
        return done[release, patched]

    return of


@pytest.fixture(scope="session")
def run_workers(server, model, tree_of, tmp_path_factory) -> Callable[..., list]:
    """``run_workers(script, release, patched, *names, ranks=2)``: what each rank of a script of cases wrote.

    The script is called with RELEASE MODEL_DIR OUT_DIR [CASE ...], and rank r writes OUT_DIR/rank_r.json.
    """
    begun: set[tuple[str, str, bool]] = set()

    def run(script: str, release: str, patched: bool, *names: str, ranks: int = 2) -> list:
        assert (script, release, patched) not in begun, "they did not run: the first of these tests shows why"
        begun.add((script, release, patched))
        lock = "requirements/workers.lock"
        assert "workers" in find_release(release).dependencies, f"verl {release} does not run with {lock}"
        variables = {
            **os.environ,
            "PYTHONPATH": f"{tree_of(release, patched)}:{REPO}:{REPO / 'scripts'}",
            "OMP_NUM_THREADS": "1",
            "VERL_PLATFORM": "cpu",  # this and the next are read only by verl 0.9
            "VERL_ENGINE_DEVICE": "cuda",
        }
        out = tmp_path_factory.mktemp(f"{release}-outcomes")
        server.check([SUITE / script, release, model, out, *names], variables, out, ranks=ranks)
        return [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(ranks)]

    return run


@pytest.fixture(scope="session")
def outcomes(run_workers, request, pytestconfig) -> Iterator[Outcomes]:
    """``outcomes(release, patched)``: the outcomes of that tree by case.

    Only the cases that the session's tests name are run, and on an unpatched tree those that are not recorded.
    """
    of_suite = [item for item in request.session.items if item.path.is_relative_to(SUITE)]
    items = [item for item in of_suite if "outcomes" in getattr(item, "fixturenames", ())]
    named = {item.callspec.params["case"] for item in items}
    recorded = UpstreamOutcomes(UPSTREAM, SUITE, DIGESTS)
    done: dict[tuple[str, bool], Mapping[str, str]] = {}

    def of(release: str, patched: bool) -> Mapping[str, str]:
        if (release, patched) not in done:
            known = {} if patched or pytestconfig.getoption("write_results") else recorded.of(release)
            wanted = sorted(named - known.keys())
            first, second = run_workers("cases.py", release, patched, *wanted) if wanted else ({}, {})
            assert first == second, f"the ranks differ\n{first}\n{second}"
            done[release, patched] = known | first
        return done[release, patched]

    yield of
    if pytestconfig.getoption("write_results") and named == set(BEHAVIOURS):
        ran = [release for release in RELEASES if (release, True) in done and (release, False) in done]
        write_results({release: verdicts(release, BEHAVIOURS, of) for release in ran}, RESULTS, VERL, SUITE)
        recorded.write({release: of(release, False) for release in ran})
