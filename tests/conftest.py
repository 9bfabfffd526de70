"""Fixtures of all tests: verl 0.9.1 pristine and patched, a tiny model, and processes that import either tree."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.trees import RELEASE, patched_tree
from xdist.scheduler import LoadScopeScheduling

from verl_precision.patch.releases import VERL
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.paths import REPO
from verl_precision.run.job import CPU_PLATFORM

# What verl and the cases import, except verl itself.
PRELOAD = (
    *("torch.distributed._tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.profiler"),
    *("transformers.models.auto.modeling_auto", "transformers.models.qwen2.modeling_qwen2", "peft"),
    *("transformers.trainer_pt_utils", "tensordict", "torchdata.stateful_dataloader", "pandas", "datasets", "hydra"),
    *("ray.util.collective", "transfer_queue", "codetiming", "orjson", "fastapi", "uvicorn", "aiohttp", "cachetools"),
)


def pytest_addoption(parser):
    for framework in ("verl", "oat"):
        parser.addoption(
            f"--{framework}-tree",
            type=lambda folder: Path(folder).resolve(),
            metavar="DIR",
            help=f"test this patched {framework} instead of a freshly patched one of its release",
        )
    parser.addoption(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where tests/engine/test_on_device.py computes"
    )
    parser.addoption(
        "--write-results",
        action="store_true",
        help="write the outcomes of the releases into tests/expected",
    )


def pytest_configure(config):
    """Restore the default SIGINT handler, which background processes such as CI jobs inherit as ignored.

    Unset RAY_ADDRESS, which would send every run to that cluster. Refuse to record the outcomes of a given tree.
    """
    for framework in ("verl", "oat"):
        if config.getoption("write_results") and config.getoption(f"{framework}_tree"):
            raise pytest.UsageError(f"--{framework}-tree: --write-results records only the patches of this checkout")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("RAY_ADDRESS", None)


class ByFixtures(LoadScopeScheduling):
    """Run tests that share fixtures in one process: end-to-end runs, the tests of one file, or of one release in it."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.startswith("tests/e2e/"):
            return "e2e"
        release = re.search(r"\d+\.\d+\.\d+", nodeid) if file.startswith("tests/conformance/verl/") else None
        return f"{file} {release[0]}" if release else file


@pytest.hookimpl(optionalhook=True)  # the hook does not exist under -p no:xdist
def pytest_xdist_make_scheduler(config, log):
    return ByFixtures(config, log)


class Trees(dict):
    """Folders that contain ``verl/``, "pristine" and "patched", each made when it is first asked for.

    Args:
        given: a patched tree to take if it is of the release, with the series ``fixes`` or without.
    """

    def __init__(self, root: Path, given: Path | None) -> None:
        self.root, self.given = root, given

    def __missing__(self, state: str) -> Path:
        given = self.given if state == "patched" else None
        if given and json.loads((given / VERL.stamp).read_text())["release"] == RELEASE:
            self[state] = given
        elif state == "patched":
            self[state] = patched_tree(RELEASE, self.root / state, given=None)
        else:
            self[state] = unpacked_wheel(RELEASE, self.root / state)
        return self[state]


@pytest.fixture(scope="session")
def trees(tmp_path_factory, pytestconfig) -> dict[str, Path]:
    """Folders that contain ``verl/``: "pristine" and "patched"."""
    return Trees(tmp_path_factory.mktemp("verl"), pytestconfig.getoption("verl_tree"))


@pytest.fixture(scope="session")
def environment(trees, pytestconfig) -> Callable[[str], dict[str, str]]:
    """``environment(state)``: the variables under which a process imports that tree's verl and runs it on --device."""
    # cuBLAS gives the same bits again with this workspace.
    platform = {"cpu": CPU_PLATFORM, "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}}[pytestconfig.getoption("device")]

    def of(state: str) -> dict[str, str]:
        path = (trees[state], REPO, REPO / "tests")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, path), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            **platform,
        }

    return of


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """The sanity task's model with its first weights, and its tokenizer."""
    from recipes.arithmetic.model import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory) -> Iterator[ForkServer]:
    """The process from which ranks are forked; it has imported what verl and the cases import of others."""
    with ForkServer(PRELOAD, tmp_path_factory.mktemp("fork-server") / "server.log") as server:
        yield server


@pytest.fixture(scope="session")
def run_ranks(fork_server, environment, tiny_model, tmp_path_factory) -> Callable[..., list[dict]]:
    """``run_ranks(tree, script, strategy, *names, ranks=2)``: the outcomes that each rank of a script of cases wrote.

    The script is called with STRATEGY MODEL_DIR OUT_DIR [CASE ...], and rank r writes OUT_DIR/rank_r.json.
    """

    def run(state: str, script: Path, strategy: str, *names: str, ranks: int = 2) -> list[dict]:
        out = tmp_path_factory.mktemp(f"{state}-{strategy}")
        fork_server.check([script, strategy, tiny_model, out, *names], environment(state), out, ranks=ranks)
        return [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(ranks)]

    return run
