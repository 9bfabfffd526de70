"""One conformance suite for all releases of OAT: behaviours of patched trees, predicted outcomes of unpatched ones."""

import pytest
from oat_behaviours import BEHAVIOURS, RELEASES
from support.conformance import outcome

pytestmark = [
    pytest.mark.releases,
    pytest.mark.parametrize("case", BEHAVIOURS),
    pytest.mark.parametrize("release", RELEASES),
]


def seen(outcomes, release: str, case: str, patched: bool) -> str:
    if why := BEHAVIOURS[case].why_absent(release):
        assert case not in outcomes(release, patched)
        pytest.skip(f"oat {release}: {why}")
    return outcome(outcomes, release, case, patched)


def test_patched_oat_has_the_behaviour(outcomes, release, case):
    assert seen(outcomes, release, case, patched=True) == BEHAVIOURS[case].patched


def test_unpatched_oat_has_the_predicted_outcome(outcomes, release, case):
    assert seen(outcomes, release, case, patched=False) == BEHAVIOURS[case].predicted(release)
