"""Import verl's modules by themselves, and run the engine's cases."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from lib.patches.precision_module import load_precision
from lib.paths import REPO


def load(file: Path) -> ModuleType:
    """Import ``file`` under its stem."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_configure(config):
    """Make ``import precision``, ``manifest`` and ``weight_sync`` work without the rest of verl."""
    root = config.getoption("verl_tree") or REPO / "patches/verl/files"
    utils = root / "verl/utils"
    load(utils / "checkpoint/manifest.py")
    with pytest.MonkeyPatch.context() as patch:  # other tests may have loaded it
        patch.setitem(sys.modules, "verl.utils.precision", load_precision(root, "precision"))
        load(utils / "weight_sync.py")


@pytest.fixture
def one_rank(tmp_path):
    """Initialize a process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def cases(run_ranks, request) -> Callable[..., list[dict]]:
    """``cases(tree, strategy, ranks=2)``: the outcomes of engine_cases.py, one dict per rank; run once per session.

    Only cases named by the parameter ``case`` of the session's tests are run, or all if a test has no such parameter.
    """
    done: dict[tuple[str, str, int], list[dict]] = {}
    readers = [item for item in request.session.items if "cases" in item.fixturenames]
    named = {item.callspec.params["case"] for item in readers if "case" in item.fixturenames}
    names = sorted(named) if all("case" in item.fixturenames for item in readers) else []
    script = Path(__file__).with_name("engine_cases.py")

    def of(state: str, strategy: str, ranks: int = 2) -> list[dict]:
        if (state, strategy, ranks) not in done:
            done[state, strategy, ranks] = run_ranks(state, script, strategy, *names, ranks=ranks)
        return done[state, strategy, ranks]

    return of
