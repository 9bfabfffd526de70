"""verl's modules by themselves, and the engine's cases."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[2]


def load(file: Path) -> ModuleType:
    """Import ``file`` under its stem."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_configure(config):
    """Make ``import precision``, ``manifest`` and ``weight_sync`` find these modules without the rest of verl."""
    utils = (config.getoption("verl_tree") or REPO / "patches/verl/files") / "verl/utils"
    load(utils / "checkpoint/manifest.py")
    with pytest.MonkeyPatch.context() as patch:  # which others may have loaded
        patch.setitem(sys.modules, "verl.utils.precision", load(utils / "precision.py"))
        load(utils / "weight_sync.py")


@pytest.fixture(scope="session")
def cases(torchrun, request) -> Callable[..., list[dict]]:
    """``cases(tree, strategy, ranks=2)``: the outcomes of engine_cases.py, one dict a rank; run once a session each.

    Only the cases run that the session's tests read by their parameter ``case``; a test without one may read any.
    """
    done: dict[tuple[str, str, int], list[dict]] = {}
    readers = [item for item in request.session.items if "cases" in item.fixturenames]
    named = {item.callspec.params["case"] for item in readers if "case" in item.fixturenames}
    names = sorted(named) if all("case" in item.fixturenames for item in readers) else []
    script = Path(__file__).with_name("engine_cases.py")

    def of(state: str, strategy: str, ranks: int = 2) -> list[dict]:
        if (state, strategy, ranks) not in done:
            done[state, strategy, ranks] = torchrun(state, script, strategy, *names, ranks=ranks)
        return done[state, strategy, ranks]

    return of
