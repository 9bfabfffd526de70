"""The releases that `make test` runs: outcomes of the others are recorded, or left to `make test-all`."""

from collections.abc import Iterable

import pytest

from support.recorded import RECORDINGS, Recording
from verl_precision.patch.releases import Framework, load_releases


def live_releases(recording: Recording) -> set[str]:
    """Return the newest release, and those whose results are not valid."""
    releases = list(load_releases(framework=recording.framework))
    return {releases[-1]} | set(releases) - recording.valid()


def mark(recording: Recording, items: Iterable[pytest.Item]) -> None:
    """Mark the tests of a conformance suite that `make test` leaves out.

    Those that take recorded outcomes are ``recorded`` for releases whose results are valid. The rest of the suite runs
    for ``live_releases``; others are ``slow``.
    """
    live, valid = live_releases(recording), recording.valid()
    for item in items:
        if item.path.is_relative_to(recording.suite):
            release, takes_outcomes = item.callspec.params["release"], "outcomes" in item.fixturenames
            if takes_outcomes and release in valid:
                item.add_marker("recorded")
            elif release not in live:
                item.add_marker("slow")


def every_release(framework: Framework) -> list:
    """Return all releases as parameters of a test; those that are not live are slow."""
    live = live_releases(RECORDINGS[framework])
    return [
        pytest.param(name, marks=[] if name in live else [pytest.mark.slow])
        for name in load_releases(framework=framework)
    ]
