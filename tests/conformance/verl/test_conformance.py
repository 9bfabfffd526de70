"""One conformance suite for all releases: behaviours of patched trees, predicted outcomes of unpatched ones."""

import pytest
from behaviours import BEHAVIOURS, RELEASES, compared, outcome

pytestmark = [
    pytest.mark.releases,
    pytest.mark.parametrize("case", BEHAVIOURS),
    pytest.mark.parametrize("release", RELEASES),
]


def both(outcomes, release: str, case: str) -> tuple[str, str]:
    """Return the outcomes of a case on the patched and on the unpatched tree."""
    if why := BEHAVIOURS[case].why_absent(release):
        assert not any(case in cases for tree in outcomes(release) for cases in tree.values())
        pytest.skip(f"verl {release}: {why}")
    return compared(*(outcome(tree, case) for tree in outcomes(release)))


def test_patched_release_has_the_behaviour(outcomes, release, case):
    assert both(outcomes, release, case)[0] == BEHAVIOURS[case].patched


def test_unpatched_release_has_the_predicted_outcome(outcomes, release, case):
    assert both(outcomes, release, case)[1] == BEHAVIOURS[case].predicted(release)
