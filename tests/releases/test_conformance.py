"""One conformance suite for all releases: a patched tree does what it should, an unpatched one what was predicted."""

import pytest
from behaviours import BEHAVIOURS, RELEASES, compared, outcome

pytestmark = [
    pytest.mark.releases,
    pytest.mark.parametrize("case", BEHAVIOURS),
    pytest.mark.parametrize("release", RELEASES),
]


def seen(outcomes, release: str, case: str) -> tuple[str, str]:
    """What the patched and the unpatched tree do."""
    if why := BEHAVIOURS[case].why_absent(release):
        assert not any(case in cases for tree in outcomes(release) for cases in tree.values())
        pytest.skip(f"verl {release}: {why}")
    return compared(*(outcome(tree, case) for tree in outcomes(release)))


def test_the_patched_release_has_the_behaviour(outcomes, release, case):
    assert seen(outcomes, release, case)[0] == BEHAVIOURS[case].patched


def test_the_unpatched_release_does_what_was_predicted(outcomes, release, case):
    assert seen(outcomes, release, case)[1] == BEHAVIOURS[case].predicted(release)
