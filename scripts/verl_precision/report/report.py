"""Define the content of a report: its runs, aligned by step, and their statistics."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from verl_precision.report.catalog import Steps
from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.statistics import Spread, Verdict


@dataclass(frozen=True)
class Entry:
    """A run in a report.

    Attributes:
        id: LABEL-seedN, or LABEL-N where the seed is not recorded; the folder's name in ``runs/``.
        shared: its metrics at the steps that all runs have.
        outcomes: by name, computed from ``shared``.
        passed: the step at which it passed the threshold, ``collapsed`` at which it collapsed; None where it did not.
        departure: why it does not count as a run of the regime that it names, "" where it does.
    """

    id: str
    run: LoggedRun
    shared: Steps
    outcomes: dict[str, float | None]
    passed: int | None
    collapsed: int | None
    departure: str


@dataclass(frozen=True)
class Report:
    """A report, ready to be written.

    Attributes:
        threshold: the reward that the moving mean has to exceed.
        labels: those that have runs; ``without`` those that should and have none.
        common: the steps that all runs have.
        notes: what a reader must know of the input.
        spreads: by label and outcome.
        departures: by label the first run's that does not count as one of its regime, "" where all do.
        nospeed: why no speed may be claimed for any run, "" where it may; ``unclaimed`` by label that or the departure.
        differs: the keys of the composed configuration in which runs differ, by run; None where it is not recorded.
    """

    title: str
    threshold: float
    labels: tuple[str, ...]
    without: tuple[str, ...]
    entries: tuple[Entry, ...]
    common: tuple[int, ...]
    notes: tuple[str, ...]
    spreads: dict[str, dict[str, Spread]]
    departures: dict[str, str]
    nospeed: str
    unclaimed: dict[str, str]
    verdicts: tuple[Verdict, ...]
    differs: dict[str, dict[str, str | None]]

    def of(self, label: str) -> list[Entry]:
        """Return the runs of a label."""
        return [entry for entry in self.entries if entry.run.label == label]


def spread_over(members: Sequence[Entry], values: Sequence[float | None]) -> Spread:
    """Return the spread of one value a run, None for a run that has none."""
    pairs = [(entry.run.seed, value) for entry, value in zip(members, values, strict=True) if value is not None]
    seeds = [seed for seed, _ in pairs]
    different = len(set(seeds) - {None}) + seeds.count(None)
    return Spread(tuple(value for _, value in pairs), len(members), different)


def count_seeds(members: Sequence[Entry]) -> int:
    """Return the number of different seeds; a run whose seed is not recorded counts as another."""
    return spread_over(members, [0.0] * len(members)).seeds


def step_range(steps: Iterable[int]) -> str:
    """Return ``steps 1 to 32``, and how many there are where some between are missing."""
    ordered = sorted(steps)
    missing = ordered[-1] - ordered[0] + 1 - len(ordered)
    text = f"steps {ordered[0]} to {ordered[-1]}" if len(ordered) > 1 else f"step {ordered[0]}"
    return f"{text} ({len(ordered)} of them)" if missing else text
