"""One conformance suite for all releases of OAT: a patched tree does what it should, an unpatched one as predicted."""

import json

import pytest
from behaviours import compared
from oat_behaviours import BEHAVIOURS, RELEASES, RESULTS

from lib.patches.releases import OAT, find_release
from lib.patches.stack import load_stack

pytestmark = pytest.mark.releases
of_each = pytest.mark.parametrize("case", BEHAVIOURS)


def outcomes(seen, release: str, case: str) -> tuple[str, str]:
    """What the patched and the unpatched tree do."""
    if why := BEHAVIOURS[case].why_absent(release):
        pytest.skip(f"oat {release}: {why}")
    return compared(seen(release, True)[case], seen(release, False)[case])


@of_each
@pytest.mark.parametrize("release", RELEASES)
def test_the_patched_oat_has_the_behaviour(seen, release, case):
    assert outcomes(seen, release, case)[0] == BEHAVIOURS[case].patched


@of_each
@pytest.mark.parametrize("release", RELEASES)
def test_the_unpatched_oat_does_what_was_predicted(seen, release, case):
    assert outcomes(seen, release, case)[1] == BEHAVIOURS[case].predicted(release)


@pytest.mark.parametrize("release", RELEASES)
def test_the_results_are_of_this_stack_and_all_passed(release, pytestconfig):
    if pytestconfig.getoption("write_results"):
        pytest.skip("they are being written")
    written = json.loads(RESULTS.read_text())[release]
    assert written["stack"] == load_stack(find_release(release, framework=OAT)).id, "make test-oat"
    assert all(one.get("passed", True) for one in written["seen"].values())
    assert {case for case in written["seen"] if not case.startswith("not_run")} == set(BEHAVIOURS)
