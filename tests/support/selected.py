"""The releases that `make test` runs: outcomes of the others are recorded, or left to `make test-all`."""

from collections.abc import Iterable
from functools import cache

import pytest

from support.recorded import RECORDINGS, Recording
from verl_precision.patch.releases import Framework, load_releases


def changed_releases(recording: Recording) -> set[str]:
    """Return the releases whose results are not valid."""
    return set(load_releases(framework=recording.framework)) - recording.valid()


def live_releases(recording: Recording) -> set[str]:
    """Return the newest release, and those whose results are not valid."""
    return changed_releases(recording) | {newest(recording)}


def newest(recording: Recording) -> str:
    return list(load_releases(framework=recording.framework))[-1]


def mark(recording: Recording, items: Iterable[pytest.Item]) -> None:
    """Mark the tests of a conformance suite that `make test` leaves out.

    Those that take recorded outcomes are ``recorded`` for releases whose results are valid. The rest of the suite runs
    for ``live_releases``; others are ``slow``.
    """
    changed = changed_releases(recording)
    live = changed | {newest(recording)}
    for item in items:
        if item.path.is_relative_to(recording.suite):
            release, takes_outcomes = item.callspec.params["release"], "outcomes" in item.fixturenames
            if release not in (changed if takes_outcomes else live):
                item.add_marker("recorded" if takes_outcomes else "slow")


@cache  # nothing changes while tests are collected
def every_release(framework: Framework) -> list:
    """Return all releases as parameters of a test; those that are not live are slow."""
    live = live_releases(RECORDINGS[framework])
    return [
        pytest.param(name, marks=[] if name in live else [pytest.mark.slow])
        for name in load_releases(framework=framework)
    ]
