"""Define the content of a report: its runs, aligned by step, and their statistics."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from verl_precision.errors import Refused
from verl_precision.report.catalog import Steps, outcomes
from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.statistics import LEAST_SEEDS, Spread, Verdict, collapsed, passed, spread_over, verdicts


@dataclass(frozen=True)
class Entry:
    """A run in a report.

    Attributes:
        id: LABEL-seedN, or LABEL-N if the seed is not recorded; the folder's name in ``runs/``.
        shared: its metrics at the steps that all runs have.
        outcomes: by name, computed from ``shared``; besides, the steps at which it ``passed`` the threshold and
            ``collapsed``, computed from all its steps. None if there is no such value.
    """

    id: str
    run: LoggedRun
    shared: Steps
    outcomes: dict[str, float | None]


@dataclass(frozen=True)
class Report:
    """A report, ready to be written.

    Attributes:
        threshold: the reward that the moving mean has to exceed.
        nospeed: why no speed may be claimed for any run, "" if it may.
        entries: the runs, those of a label together.
        common: the steps that all runs have.
    """

    title: str
    threshold: float
    nospeed: str
    entries: tuple[Entry, ...]
    common: tuple[int, ...]

    @cached_property
    def by_label(self) -> dict[str, list[Entry]]:
        """The runs of each label."""
        grouped: dict[str, list[Entry]] = {}
        for entry in self.entries:
            grouped.setdefault(entry.run.label, []).append(entry)
        return grouped

    @cached_property
    def spreads(self) -> dict[str, dict[str, Spread]]:
        """The spread of each outcome, by label and outcome."""
        return {
            label: {
                name: spread_over([(entry.run.seed, entry.outcomes[name]) for entry in members])
                for name in members[0].outcomes
            }
            for label, members in self.by_label.items()
        }

    @cached_property
    def unclaimed(self) -> dict[str, str]:
        """By label why no speed may be claimed, "" if it may; the first run that departs from its regime decides."""
        return {
            label: next((f"{each.id}: {each.run.departure}" for each in members if each.run.departure), self.nospeed)
            for label, members in self.by_label.items()
        }

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdicts on the labels that have enough seeds for one."""
        return verdicts({label: self.spreads[label] for label in self.tested}, self.unclaimed)

    @cached_property
    def tested(self) -> list[str]:
        """The labels with at least ``LEAST_SEEDS`` different seeds."""
        return [label for label, members in self.by_label.items() if count_seeds(members) >= LEAST_SEEDS]

    @cached_property
    def differs(self) -> dict[str, dict[str, str | None]]:
        """The keys of the configuration in which runs differ."""
        return config_differences(self.entries)


def build_report(several: Sequence[LoggedRun], threshold: float, title: str, nospeed: str = "") -> Report:
    """Return the report on runs.

    Raises:
        Refused: the runs have no step in common.
    """
    labels = list(dict.fromkeys(run.label for run in several))
    ordered = sorted(several, key=lambda run: labels.index(run.label))
    common = sorted(set.intersection(*(set(run.steps) for run in ordered)))
    if not common:
        ranges = ", ".join(f"{run.label}={run.name} has {step_range(run.steps)}" for run in ordered)
        raise Refused(f"the runs have no step in common: {ranges}")
    entries = []
    for name, run in zip(ids(ordered), ordered, strict=True):
        shared = {step: run.steps[step] for step in common}
        events = {"passed": passed(run.steps, threshold), "collapsed": collapsed(run.steps)}
        entries.append(Entry(name, run, shared, events | outcomes(shared)))
    return Report(title, threshold, nospeed, tuple(entries), tuple(common))


def ids(ordered: Sequence[LoggedRun]) -> list[str]:
    """Return a different name for each run."""
    names, seen = [], Counter()
    for run in ordered:
        seen[run.label] += 1
        name = f"{run.label}-{seen[run.label]}" if run.seed is None else f"{run.label}-seed{run.seed}"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def count_seeds(members: Sequence[Entry]) -> int:
    """Return the number of different seeds; an unrecorded one counts as another."""
    return spread_over([(entry.run.seed, 0.0) for entry in members]).seeds


def step_range(steps: Iterable[int]) -> str:
    """Return ``steps 1 to 32``, and how many there are if some between are missing."""
    ordered = sorted(steps)
    missing = ordered[-1] - ordered[0] + 1 - len(ordered)
    text = f"steps {ordered[0]} to {ordered[-1]}" if len(ordered) > 1 else f"step {ordered[0]}"
    return f"{text} ({len(ordered)} of them)" if missing else text


def config_differences(entries: Sequence[Entry]) -> dict[str, dict[str, str | None]]:
    """Return the keys in which recorded configurations differ: by run's id the value as JSON, None if it has none.

    Runs of verl are compared with one another, and runs of OAT: the two have no key in common.
    """
    differences = {}
    for framework in dict.fromkeys(entry.run.framework for entry in entries):
        recorded = [entry for entry in entries if entry.run.config and entry.run.framework == framework]
        for key in dict.fromkeys(key for entry in recorded for key in entry.run.config):
            values = {e.id: json.dumps(e.run.config[key]) if key in e.run.config else None for e in recorded}
            if len(set(values.values())) > 1:
                differences[key] = values
    return differences
