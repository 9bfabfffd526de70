"""One conformance suite for all releases of OAT: behaviours of patched trees, predicted outcomes of unpatched ones."""

import json

import pytest
from oat_behaviours import BEHAVIOURS, RELEASES, RESULTS
from support.conformance import outcome

from lib.patches.releases import OAT, find_release
from lib.patches.stack import load_stack

pytestmark = pytest.mark.releases
of_each = pytest.mark.parametrize("case", BEHAVIOURS)


def seen(outcomes, release: str, case: str, patched: bool) -> str:
    if why := BEHAVIOURS[case].why_absent(release):
        pytest.skip(f"oat {release}: {why}")
    return outcome(outcomes, release, case, patched)


@of_each
@pytest.mark.parametrize("release", RELEASES)
def test_patched_oat_has_the_behaviour(outcomes, release, case):
    assert seen(outcomes, release, case, patched=True) == BEHAVIOURS[case].patched


@of_each
@pytest.mark.parametrize("release", RELEASES)
def test_unpatched_oat_has_the_predicted_outcome(outcomes, release, case):
    assert seen(outcomes, release, case, patched=False) == BEHAVIOURS[case].predicted(release)


@pytest.mark.parametrize("release", RELEASES)
def test_recorded_results_match_the_stack_and_passed(release, pytestconfig):
    if pytestconfig.getoption("write_results"):
        pytest.skip("the results are being written")
    written = json.loads(RESULTS.read_text())[release]
    assert written["stack"] == load_stack(find_release(release, framework=OAT)).id, "make test-oat"
    assert all(one.get("passed", True) for one in written["seen"].values())
    assert {case for case in written["seen"] if not case.startswith("not_run")} == set(BEHAVIOURS)
