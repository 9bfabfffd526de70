"""Write the tables of a report, by label, by run and of verdicts, as CSV and Markdown, for page and terminal."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev

from verl_precision.format import significant
from verl_precision.report.catalog import OUTCOMES, CatalogOutcome
from verl_precision.report.report import Entry, Report, count_seeds, spread_over, step_range
from verl_precision.report.statistics import ERROR, LEAST_SEEDS, Spread, Verdict, is_bitwise

NONE = "–"
METHOD = (
    "Mean ± sample standard deviation over the seeds. There is a verdict where Welch's interval at {level} (95 % over "
    "the {pairs} of an outcome together, Bonferroni) leaves out equality, with at least {seeds} seeds on each side. "
    "Mismatch and speed are compared by the ratio of geometric means, the others by difference. Outcomes are not "
    "corrected for one another."
)


def mean_and_spread(outcome: CatalogOutcome, spread: Spread) -> str:
    """Return ``0.960 ± 0.003``, and of how many runs where some have no value."""
    if not spread.values:
        return "not recorded" if outcome.agreement else NONE
    form = outcome.form
    text = format(spread.mean, form) if form else significant(spread.mean)
    if is_bitwise(outcome, spread):
        text = "bitwise"
    elif spread.std is not None:
        text += f" ± {format(spread.std, form) if form else significant(spread.std, 2)}"
    return text if len(spread.values) == spread.runs else f"{text} ({len(spread.values)} of {spread.runs})"


def at_step(entries: list[Entry], attribute: str) -> str:
    """Return ``at 20 ± 2`` where it happened in all runs, else in how many of them and where.

    Args:
        attribute: ``passed`` or ``collapsed``.
    """
    steps = [step for entry in entries if (step := getattr(entry, attribute)) is not None]
    if not steps:
        return "never"
    if len(steps) < len(entries):
        return f"{len(steps)} of {len(entries)}, at {', '.join(map(str, steps))}"
    return f"at {fmean(steps):.3g}" + (f" ± {stdev(steps):.2g}" if len(steps) > 1 else "")


def present_outcomes(report: Report) -> list[CatalogOutcome]:
    """Return the outcomes that any run has."""
    return [each for each in OUTCOMES if any(report.spreads[label][each.name].values for label in report.labels)]


def cell(text: str, unclaimed: str = "") -> dict[str, str]:
    """Return a cell as the page's template reads it; ``unclaimed``: why its value is no claim."""
    return {"text": text, "unclaimed": unclaimed}


def label_rows(report: Report) -> list[tuple[str, list[dict[str, str]]]]:
    """Return the lines of the table by label: a name and a cell a label."""
    by_label = [report.of(label) for label in report.labels]
    rows = [
        ("runs", [cell(str(len(members))) for members in by_label]),
        (f"passes {report.threshold:g}", [cell(at_step(members, "passed")) for members in by_label]),
        ("collapses", [cell(at_step(members, "collapsed")) for members in by_label]),
    ]
    present = present_outcomes(report)
    for outcome in (each for each in OUTCOMES if each in present or each.agreement):
        cells = []
        for label in report.labels:
            text = mean_and_spread(outcome, report.spreads[label][outcome.name])
            why = report.unclaimed[label] if outcome.speed and text != NONE else ""
            cells.append(cell(text, f"not claimed: {why}" if why else ""))
        rows.append((outcome.title, cells))
    return rows


def run_rows(report: Report) -> tuple[list[str], list[list]]:
    """Return the names of the columns and a line a run, every number unrounded."""
    outcomes = present_outcomes(report)
    names = ["run", "label", "seed", "name", "source", "steps", "common_steps", "passed_at", "collapsed_at"]
    names += [outcome.name for outcome in outcomes] + ["wall_s", "peak_memory_gib", "not_claimed"]
    lines = []
    for entry in report.entries:
        run = entry.run
        lines.append(
            [entry.id, run.label, run.seed, run.name, run.source, len(run.steps), len(report.common)]
            + [entry.passed, entry.collapsed, *(entry.outcomes[outcome.name] for outcome in outcomes)]
            + [run.summary.get("wall_s"), run.summary.get("peak_memory_gib"), entry.departure or report.nospeed]
        )
    return names, lines


def write_csv(file: Path, names: Sequence[str], lines: Iterable[Sequence]) -> None:
    """Write a head of ``names`` and the lines, which end with a line feed alone."""
    with file.open("w", newline="") as content:
        writer = csv.writer(content, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(lines)


def write_tables(report: Report, out: Path) -> None:
    """Write ``table.csv`` and ``table.md`` by label, ``runs.csv`` by run, and ``verdicts.csv`` into ``out``."""
    speed = {outcome.name for outcome in OUTCOMES if outcome.speed}
    lines = []
    for label in report.labels:
        members = report.of(label)
        spreads = {
            name: spread_over(members, [getattr(entry, name) for entry in members]) for name in ("passed", "collapsed")
        }
        spreads |= {outcome.name: report.spreads[label][outcome.name] for outcome in present_outcomes(report)}
        for name, spread in spreads.items():
            bounds = (min(spread.values), max(spread.values)) if spread.values else (None, None)
            why = report.unclaimed[label] if name in speed else ""
            lines.append([label, name, spread.runs, len(spread.values), spread.mean, spread.std, *bounds, why])
    write_csv(out / "table.csv", ["label", "outcome", "runs", "n", "mean", "std", "min", "max", "not_claimed"], lines)
    write_csv(out / "runs.csv", *run_rows(report))
    fields = ("outcome", "first", "second", "effect", "low", "high", "holds", "text")
    write_csv(out / "verdicts.csv", fields, [[getattr(each, name) for name in fields] for each in report.verdicts])
    (out / "table.md").write_text(markdown(report))


def markdown(report: Report) -> str:
    """Return the tables as Markdown."""
    lines = [f"# {report.title}", "", summary(report), ""]
    lines += [f"- {note}" for note in report.notes]
    lines += [""] * bool(report.notes)
    lines += [f"| | {' | '.join(report.labels)} |", "|---" * (1 + len(report.labels)) + "|"]
    for name, cells in label_rows(report):
        texts = [f"~~{of['text']}~~ {of['unclaimed']}" if of["unclaimed"] else of["text"] for of in cells]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    lines += ["", method(report), ""]
    if pairs_with_verdicts(report):
        lines += ["| outcome | | verdict |", "|---|---|---|"]
        for row in verdict_rows(report):
            lines += [f"| {row.title} | {each.first}, {each.second} | {each.text} |" for each in row.verdicts if each]
        lines += [""]
    return "\n".join(lines)


def on_screen(report: Report) -> str:
    """Return for the terminal the table by label, the notes, and the verdicts that separate labels."""
    rows = [("", list(map(cell, report.labels))), *label_rows(report)]
    texts = [[name, *(f"({of['text']})" if of["unclaimed"] else of["text"] for of in cells)] for name, cells in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)) for row in texts]
    titles = {of.name: of.title for of in OUTCOMES}
    separating = [each for each in report.verdicts if each.holds]
    lines += ["", *(f"  {note}" for note in report.notes)]
    lines += ["", *(f"  {titles[each.outcome]}: {each.first}, {each.second}: {each.text}" for each in separating)]
    return "\n".join(line.rstrip() for line in lines)


def method(report: Report) -> str:
    """Return how spreads and verdicts are computed."""
    pairs = max(len(report.labels) * (len(report.labels) - 1) // 2, 1)
    return METHOD.format(
        level=f"{100 * (1 - ERROR / pairs):.3g} %",
        pairs="one pair" if pairs == 1 else f"{pairs} pairs",
        seeds=LEAST_SEEDS,
    )


def summary(report: Report) -> str:
    """Return one line on the runs that are compared."""
    counts = ", ".join(f"{label} ({len(report.of(label))})" for label in report.labels)
    return f"{len(report.entries)} run{'s' * (len(report.entries) > 1)}: {counts}; {step_range(report.common)}."


def pairs_with_verdicts(report: Report) -> list[tuple[str, str]]:
    """Return the pairs of labels that both have enough seeds for a verdict."""
    enough = [label for label in report.labels if count_seeds(report.of(label)) >= LEAST_SEEDS]
    return list(combinations(enough, 2))


@dataclass(frozen=True)
class VerdictRow:
    """The verdicts on an outcome, one a pair of ``pairs_with_verdicts``; None where a label logs no such metric."""

    title: str
    verdicts: tuple[Verdict | None, ...]

    @property
    def separates(self) -> bool:
        """Return whether the outcome separates any two labels."""
        return any(each.holds for each in self.verdicts if each)


def verdict_rows(report: Report) -> list[VerdictRow]:
    """Return the outcomes on which there is any verdict."""
    rows = []
    for outcome in OUTCOMES:
        by_pair = {(each.first, each.second): each for each in report.verdicts if each.outcome == outcome.name}
        verdicts = tuple(by_pair.get(pair) for pair in pairs_with_verdicts(report))
        rows += [VerdictRow(outcome.title, verdicts)] * any(verdicts)
    return rows
