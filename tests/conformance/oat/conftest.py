"""Every release of OAT, as its wheel ships it and with its stack, run through ``oat_cases`` in its environment."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from oat_behaviours import BEHAVIOURS, NOT_RUN
from support import selected
from support.conformance import Outcomes, Suite
from support.oat_server import oat_server, oat_variables
from support.recorded import RECORDINGS
from support.trees import patched_tree

from verl_precision.patch.releases import OAT
from verl_precision.patch.wheels import unpacked_wheel

FOLDER = Path(__file__).parent
SUITE = Suite(RECORDINGS[OAT], BEHAVIOURS, NOT_RUN)
Run = Callable[..., dict[str, str]]


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items):
    selected.mark(SUITE.recording, items)


@pytest.fixture(scope="session")
def run_learner(tmp_path_factory, pytestconfig) -> Iterator[Run]:
    """``run_learner(release, patched, *names)``: the outcomes of these cases on that tree, in forks of one process."""
    task = tmp_path_factory.mktemp("oat")
    begun: set[tuple[str, bool]] = set()
    with oat_server(task) as server:
        server.check([FOLDER / "oat_task.py", task], oat_variables(task), task, ranks=1)

        def run(release: str, patched: bool, *names: str) -> dict[str, str]:
            assert (release, patched) not in begun, "it did not run: the first of these tests shows why"
            begun.add((release, patched))
            tree, out = (tmp_path_factory.mktemp(f"oat-{release}-{what}") for what in ("tree", "outcomes"))
            if patched:
                tree = patched_tree(release, tree, pytestconfig.getoption("oat_tree"), OAT)
            else:
                unpacked_wheel(release, tree, OAT)
            words = [FOLDER / "oat_cases.py", task / "model", task / "prompts", out, *names]
            server.check(words, oat_variables(tree), out)
            first, second = (json.loads((out / f"rank_{rank}.json").read_text()) for rank in (0, 1))
            assert first == second, f"the ranks differ\n{first}\n{second}"
            return first

        yield run


@pytest.fixture(scope="session")
def outcomes(run_learner, request) -> Iterator[Outcomes]:
    """The outcomes of each tree by case, except the cases that a release cannot have."""

    def run(release: str, patched: bool, *cases: str) -> dict[str, str]:
        present = [case for case in cases if not BEHAVIOURS[case].why_absent(release)]
        return run_learner(release, patched, *present) if present else {}

    yield from SUITE.outcomes(request, run)
