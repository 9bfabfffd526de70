"""Write notes on a report's input: missing, truncated and doubtful values, and differences within a label."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from verl_precision.facts.metrics import K3_KL
from verl_precision.format import significant
from verl_precision.report.catalog import K3_NOISE, OUTCOMES, RESPONSE_LENGTH, WINDOW
from verl_precision.report.report import Entry, count_seeds, step_range
from verl_precision.report.statistics import LEAST_SEEDS
from verl_precision.sequence_weights import UNTRUNCATED

TWO_FRAMEWORKS = (
    "Runs of OAT beside runs of verl: a step of verl's is a batch of data.train_batch_size prompts, what one of OAT's "
    "is stands below. OAT's gradient norm is the largest of a step's updates and its entropy that of the last "
    "micro-batch, where verl has means."
)


def notes(
    entries: list[Entry], by_label: dict[str, list[Entry]], common: list[int], without: tuple[str, ...], nospeed: str
) -> list[str]:
    """Return the notes, those on the whole report before those on single runs.

    Args:
        by_label: the same entries by label.
        common: the steps that all runs have.
        without: labels that should have runs and have none.
        nospeed: why no speed may be claimed for any run, "" where it may.
    """
    lines = [f"{label} has no run yet: it is not in the tables." for label in without]
    if nospeed:
        lines.append(f"No speed is claimed for any run: {nospeed}.")
    if len(entries) == 1:
        lines.append("One run only: there is no spread, and nothing to compare it with.")
    lines += on_steps(entries, common)
    few = [f"{label} ({count_seeds(of)})" for label, of in by_label.items() if count_seeds(of) < LEAST_SEEDS]
    if few and len(by_label) > 1:
        lines.append(f"No verdict on {', '.join(few)}: {LEAST_SEEDS} different seeds are needed.")
    lines += within_labels(by_label)
    lines += on_answers(by_label)
    noisy = [label for label, members in by_label.items() if any(is_noise(entry) for entry in members)]
    if noisy:
        lines.append(
            f"Of {', '.join(noisy)} a mean or median of k3 is not above {K3_NOISE:g}: that is the rounding of "
            "verl's estimate, which may even come out negative. It is not compared."
        )
    for entry in entries:
        run = entry.run
        if run.finished is False:
            lines.append(f"{entry.id} is not finished: {len(run.steps)} of {run.run['steps']} steps.")
        if entry.departure:
            lines.append(f"{entry.id}: {entry.departure}; no speed is claimed for it.")
        lines += [f"{entry.id}: {note}." for note in run.notes]
    return lines


def on_steps(entries: list[Entry], common: list[int]) -> list[str]:
    """Return the notes on steps: different ones, of two frameworks, too few."""
    lines = []
    if {len(entry.run.steps) for entry in entries} != {len(common)}:
        longer = ", ".join(
            f"{entry.id} {step_range(entry.run.steps)}" for entry in entries if len(entry.run.steps) > len(common)
        )
        lines.append(
            f"The runs have different steps: they are compared on the common ones, {step_range(common)}. "
            f"More have {longer}. Passing and collapse are looked for in all steps of a run."
        )
    if len({entry.run.framework for entry in entries}) > 1:
        lines.append(TWO_FRAMEWORKS)
    if len(common) < WINDOW:
        lines.append(f"{len(common)} common steps are fewer than the {WINDOW} of a moving mean.")
    return lines


def within_labels(by_label: dict[str, list[Entry]]) -> list[str]:
    """Return the notes on seeds that a label has twice, and on configurations that differ within labels."""
    lines = []
    differing: dict[str, list[str]] = {}
    for label, members in by_label.items():
        twice = [seed for seed, count in Counter(entry.run.seed for entry in members).items() if count > 1]
        if repeated := [str(seed) for seed in twice if seed is not None]:
            which = f"{label} has several runs of seed {', '.join(repeated)}"
            lines.append(f"{which}: each counts in means, as one seed for verdicts.")
        if keys := list(config_differences(members)):
            differing.setdefault(", ".join(keys[:4]) + ", …" * (len(keys) > 4), []).append(label)
    for keys, labels in differing.items():
        lines.append(f"Within {', '.join(labels)} the runs differ in more than their seed: {keys}.")
    return lines


def on_answers(by_label: dict[str, list[Entry]]) -> list[str]:
    """Return the note on T·k3, the mismatch that adds up over an answer, where it may decide the outcome."""
    totals: dict[str, list[float]] = {}
    for label, members in by_label.items():
        for first in (entry.shared[min(entry.shared)] for entry in members):
            total = first.get(RESPONSE_LENGTH, math.nan) * first.get(K3_KL, math.nan)
            if math.isfinite(total):
                totals.setdefault(label, []).append(total)
    means = {label: fmean(values) for label, values in totals.items()}
    if max(means.values(), default=0) <= UNTRUNCATED.learned:
        return []
    values = ", ".join(f"{significant(mean, 2)} nats in {label}" for label, mean in means.items())
    return [
        f"At the first common step, k3 times the length of an answer is {values}. This matters with sequence-level "
        f"importance weights: with untruncated ones, a small model learned up to {UNTRUNCATED.learned:g} nats and "
        f"collapsed from {UNTRUNCATED.collapsed:g} nats on (docs/results/collapse)."
    ]


def is_noise(entry: Entry) -> bool:
    """Return whether an outcome of the run is within its noise."""
    values = [(outcome, entry.outcomes[outcome.name]) for outcome in OUTCOMES if outcome.noise]
    return any(value is not None and value <= outcome.noise for outcome, value in values)


def config_differences(entries: Sequence[Entry]) -> dict[str, dict[str, str | None]]:
    """Return the keys in which recorded configurations differ, by run's id the value as JSON, None where it has none.

    Runs of verl are compared with one another, and runs of OAT: the two have no key in common.
    """
    differences = {}
    for framework in dict.fromkeys(entry.run.framework for entry in entries):
        recorded = [entry for entry in entries if entry.run.config and entry.run.framework == framework]
        if len({entry.run.config_hash for entry in recorded}) < 2:
            continue  # a kept run has a part of its configuration alone, and the hash of all of it
        configs = {entry.id: entry.run.config for entry in recorded}
        keys = dict.fromkeys(key for config in configs.values() for key in config)
        rows = {
            key: {name: json.dumps(config[key]) if key in config else None for name, config in configs.items()}
            for key in keys
        }
        differences |= {key: values for key, values in rows.items() if len(set(values.values())) > 1}
    return differences
