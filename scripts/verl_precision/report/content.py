"""Define the content of a report: its runs, aligned by step, their statistics, and notes on what is doubtful."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import fmean

from verl_precision.errors import Refused
from verl_precision.facts.metrics import K3_KL
from verl_precision.format import significant
from verl_precision.report.catalog import RESPONSE_LENGTH, WINDOW, Steps, outcomes
from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.statistics import (
    LEAST_SEEDS,
    Spread,
    Verdict,
    collapsed,
    count_seeds,
    passed,
    spread_over,
    verdicts,
)
from verl_precision.sequence_weights import UNTRUNCATED

TWO_FRAMEWORKS = "Steps, gradient norms and entropies of OAT and of verl differ in meaning: docs/reference/commands.md."


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
        entries: the runs, those of a label together.
        common: the steps that all runs have.
    """

    title: str
    threshold: float
    entries: tuple[Entry, ...]
    common: tuple[int, ...]

    @cached_property
    def by_label(self) -> dict[str, list[Entry]]:
        return {label: list(of) for label, of in groupby(self.entries, key=lambda entry: entry.run.label)}

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
    def seeds(self) -> dict[str, int]:
        """The number of different seeds, by label."""
        return {label: count_seeds([entry.run.seed for entry in of]) for label, of in self.by_label.items()}

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdicts on the labels that have enough seeds for one."""
        return verdicts({label: of for label, of in self.spreads.items() if self.seeds[label] >= LEAST_SEEDS})

    @cached_property
    def differs(self) -> dict[str, dict[str, str | None]]:
        return config_differences(self.entries)


def build_report(several: Sequence[LoggedRun], threshold: float, title: str) -> Report:
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
    entries, seen = [], Counter()
    for run in ordered:
        seen[run.label] += 1
        name = f"{run.label}-{seen[run.label]}" if run.seed is None else f"{run.label}-seed{run.seed}"
        seen[name] += 1
        name += f"-{seen[name]}" if seen[name] > 1 else ""
        shared = {step: run.steps[step] for step in common}
        events = {"passed": passed(run.steps, threshold), "collapsed": collapsed(run.steps)}
        entries.append(Entry(name, run, shared, events | outcomes(shared)))
    return Report(title, threshold, tuple(entries), tuple(common))


def step_range(steps: Iterable[int]) -> str:
    """Return ``steps 1 to 32``, or ``step 1`` of a single one."""
    first, last = min(steps), max(steps)
    return f"steps {first} to {last}" if last > first else f"step {first}"


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


def notes(report: Report) -> list[str]:
    """Return the notes, those on the whole report before those on single runs."""
    lines = []
    if longer := [each for each in report.entries if len(each.run.steps) > len(report.common)]:
        more = ", ".join(f"{entry.id} {step_range(entry.run.steps)}" for entry in longer)
        lines.append(
            f"The runs have different steps: they are compared on the common ones, {step_range(report.common)}. "
            f"More have {more}. Passing and collapse use all steps of a run."
        )
    if len({entry.run.framework for entry in report.entries}) > 1:
        lines.append(TWO_FRAMEWORKS)
    if len(report.common) < WINDOW:
        lines.append(f"{len(report.common)} common steps are fewer than the {WINDOW} of a moving mean.")
    few = [f"{label} ({seeds})" for label, seeds in report.seeds.items() if seeds < LEAST_SEEDS]
    if few and len(report.by_label) > 1:
        lines.append(f"No verdict on {', '.join(few)}: {LEAST_SEEDS} different seeds are needed.")
    lines += notes_on_labels(report) + notes_on_answers(report)
    for entry in report.entries:
        run = entry.run
        if run.finished is False:
            lines.append(f"{entry.id} is not finished: {run.progress}.")
        lines += [f"{entry.id}: {note}." for note in (run.departure, *run.notes) if note]
    return lines


def notes_on_labels(report: Report) -> list[str]:
    """Return the notes on repeated seeds of a label, and on configurations that differ within labels."""
    lines = []
    for label, members in report.by_label.items():
        counts = Counter(entry.run.seed for entry in members if entry.run.seed is not None)
        if repeated := [str(seed) for seed, count in counts.items() if count > 1]:
            which = f"{label} has several runs of seed {', '.join(repeated)}"
            lines.append(f"{which}: each counts in means, as one seed for verdicts.")
        if keys := list(config_differences(members)):
            shown = ", ".join(keys[:4]) + ", …" * (len(keys) > 4)
            lines.append(f"Within {label} the runs differ in more than their seed: {shown}.")
    return lines


def notes_on_answers(report: Report) -> list[str]:
    """Return the note on T·k3, the mismatch that adds up over an answer, if it may decide the outcome."""
    means: dict[str, float] = {}
    for label, members in report.by_label.items():
        firsts = [entry.shared[report.common[0]] for entry in members]
        # tokens times nats per token
        totals = [first.get(RESPONSE_LENGTH, math.nan) * first.get(K3_KL, math.nan) for first in firsts]
        if known := [total for total in totals if math.isfinite(total)]:
            means[label] = fmean(known)
    if max(means.values(), default=0) <= UNTRUNCATED.learned:
        return []
    values = ", ".join(f"{significant(mean, 2)} nats in {label}" for label, mean in means.items())
    return [
        f"At the first common step, k3 times the length of an answer is {values}. This matters with sequence-level "
        f"importance weights: with untruncated ones, a small model learned up to {UNTRUNCATED.learned:g} nats and "
        f"collapsed from {UNTRUNCATED.collapsed:g} nats on (docs/results/collapse)."
    ]
