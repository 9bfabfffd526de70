"""Write notes on a report's input: missing, truncated and doubtful values, and differences within a label."""

import math
from collections import Counter
from statistics import fmean

from verl_precision.facts.metrics import K3_KL
from verl_precision.format import significant
from verl_precision.report.catalog import RESPONSE_LENGTH, WINDOW
from verl_precision.report.content import Report, config_differences, count_seeds, step_range
from verl_precision.report.statistics import LEAST_SEEDS
from verl_precision.sequence_weights import UNTRUNCATED

TWO_FRAMEWORKS = (
    "Runs of OAT beside runs of verl: a step of verl is a batch of data.train_batch_size prompts; a step of OAT is "
    "described below. OAT's gradient norm is the largest of a step's updates and its entropy that of the last "
    "micro-batch, where verl has means."
)


def notes(report: Report) -> list[str]:
    """Return the notes, those on the whole report before those on single runs."""
    lines = [f"No speed is claimed for any run: {report.nospeed}."] if report.nospeed else []
    lines += on_steps(report)
    few = [f"{label} ({count_seeds(of)})" for label, of in report.by_label.items() if label not in report.tested]
    if few and len(report.by_label) > 1:
        lines.append(f"No verdict on {', '.join(few)}: {LEAST_SEEDS} different seeds are needed.")
    lines += within_labels(report) + on_answers(report)
    for entry in report.entries:
        run = entry.run
        if run.finished is False:
            lines.append(f"{entry.id} is not finished: {run.progress}.")
        if run.departure:
            lines.append(f"{entry.id}: {run.departure}; no speed is claimed for it.")
        lines += [f"{entry.id}: {note}." for note in run.notes]
    return lines


def on_steps(report: Report) -> list[str]:
    """Return the notes on steps: different ones, of two frameworks, too few."""
    lines = []
    longer = [each for each in report.entries if len(each.run.steps) > len(report.common)]
    if longer:
        more = ", ".join(f"{entry.id} {step_range(entry.run.steps)}" for entry in longer)
        lines.append(
            f"The runs have different steps: they are compared on the common ones, {step_range(report.common)}. "
            f"More have {more}. Passing and collapse use all steps of a run."
        )
    if len({entry.run.framework for entry in report.entries}) > 1:
        lines.append(TWO_FRAMEWORKS)
    if len(report.common) < WINDOW:
        lines.append(f"{len(report.common)} common steps are fewer than the {WINDOW} of a moving mean.")
    return lines


def within_labels(report: Report) -> list[str]:
    """Return the notes on repeated seeds of a label, and on configurations that differ within labels."""
    lines = []
    differing: dict[str, list[str]] = {}
    for label, members in report.by_label.items():
        counts = Counter(entry.run.seed for entry in members if entry.run.seed is not None)
        if repeated := [str(seed) for seed, count in counts.items() if count > 1]:
            which = f"{label} has several runs of seed {', '.join(repeated)}"
            lines.append(f"{which}: each counts in means, as one seed for verdicts.")
        if keys := list(config_differences(members)):
            differing.setdefault(", ".join(keys[:4]) + ", …" * (len(keys) > 4), []).append(label)
    for keys, labels in differing.items():
        lines.append(f"Within {', '.join(labels)} the runs differ in more than their seed: {keys}.")
    return lines


def on_answers(report: Report) -> list[str]:
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
