"""Every release of OAT, as its wheel ships it and with its stack, run through ``oat_cases`` in its environment."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from oat_behaviours import BEHAVIOURS, RELEASES, RESULTS, not_run
from support.conformance import IDENTICAL, Outcomes, verdicts, write_results
from support.oat_server import oat_server, oat_variables
from support.recorded import UpstreamOutcomes, mark_recorded
from support.trees import patched_tree

from lib.patches.releases import OAT
from lib.patches.wheels import unpacked_wheel
from lib.paths import REPO

SUITE = Path(__file__).parent
UPSTREAM = REPO / "tests/expected/oat-upstream.json"
# Cases whose outcome depends on the CPU: an unpatched tree always runs them.
DIGESTS = {case for case, behaviour in BEHAVIOURS.items() if behaviour.patched == IDENTICAL}
Run = Callable[..., dict[str, str]]


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items):
    mark_recorded(items, OAT, RESULTS, SUITE)


@pytest.fixture(scope="session")
def run_learner(tmp_path_factory, pytestconfig) -> Iterator[Run]:
    """``run_learner(release, patched, *names)``: the outcomes of these cases on that tree, in forks of one process."""
    task = tmp_path_factory.mktemp("oat")
    begun: set[tuple[str, bool]] = set()
    with oat_server(task) as server:
        server.check([SUITE / "oat_task.py", task], oat_variables(task), task, ranks=1)

        def run(release: str, patched: bool, *names: str) -> dict[str, str]:
            assert (release, patched) not in begun, "it did not run: the first of these tests shows why"
            begun.add((release, patched))
            tree, out = (tmp_path_factory.mktemp(f"oat-{release}-{what}") for what in ("tree", "outcomes"))
            if patched:
                tree = patched_tree(release, tree, pytestconfig.getoption("oat_tree"), OAT)
            else:
                unpacked_wheel(release, tree, OAT)
            words = [SUITE / "oat_cases.py", task / "model", task / "prompts", out, *names]
            server.check(words, oat_variables(tree), out)
            first, second = (json.loads((out / f"rank_{rank}.json").read_text()) for rank in (0, 1))
            assert first == second, f"the ranks differ\n{first}\n{second}"
            return first

        yield run


@pytest.fixture(scope="session")
def outcomes(run_learner, request, pytestconfig) -> Iterator[Outcomes]:
    """``outcomes(release, patched)``: the outcomes of that tree by case.

    Only the cases that the session's tests name are run, and on an unpatched tree those that are not recorded.
    """
    of_suite = [item for item in request.session.items if item.path.is_relative_to(SUITE)]
    items = [item for item in of_suite if "outcomes" in getattr(item, "fixturenames", ())]
    named = {item.callspec.params["case"] for item in items}
    write = pytestconfig.getoption("write_results")
    recorded = UpstreamOutcomes(UPSTREAM, SUITE, DIGESTS, OAT)
    done: dict[tuple[str, bool], Mapping[str, str]] = {}

    def of(release: str, patched: bool) -> Mapping[str, str]:
        if (release, patched) not in done:
            known = {} if patched or write else recorded.of(release)
            wanted = sorted(named - known.keys())
            done[release, patched] = known | (run_learner(release, patched, *wanted) if wanted else {})
        return done[release, patched]

    yield of
    if write and named == set(BEHAVIOURS):
        ran = [release for release in RELEASES if (release, True) in done and (release, False) in done]
        seen = {release: verdicts(release, BEHAVIOURS, of) | not_run() for release in ran}
        write_results(seen, RESULTS, OAT, SUITE)
        recorded.write({release: of(release, False) for release in ran})
