"""Write the tables of a report as CSV, and format them for page and terminal."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from statistics import fmean, stdev

from verl_precision.format import significant
from verl_precision.report.catalog import OUTCOMES, CatalogOutcome
from verl_precision.report.content import Entry, Report, step_range
from verl_precision.report.notes import notes
from verl_precision.report.statistics import ERROR, LEAST_SEEDS, Spread, Verdict, is_bitwise

NONE = "–"
TITLES = {outcome.name: outcome.title for outcome in OUTCOMES}
METHOD = (
    "Mean ± sample standard deviation over the seeds. There is a verdict if Welch's interval excludes equality, with "
    f"at least {LEAST_SEEDS} seeds on each side. The error of all verdicts on one outcome together is at most "
    f"{ERROR:.0%} (Bonferroni); outcomes are not corrected for one another. Mismatch and speed are compared by the "
    "ratio of geometric means, the others by difference."
)
Row = tuple[str, list[tuple[str, str]]]  # a name and by label a text and why it is no claim


def mean_and_spread(outcome: CatalogOutcome, spread: Spread) -> str:
    """Return ``0.960 ± 0.003``, and the number of runs that have a value if some have none."""
    if not spread.values:
        return "not recorded" if outcome.agreement else NONE
    form = outcome.form
    text = format(spread.mean, form) if form else significant(spread.mean)
    if is_bitwise(outcome, spread):
        text = "bitwise"
    elif spread.std is not None:
        text += f" ± {format(spread.std, form) if form else significant(spread.std, 2)}"
    return text if len(spread.values) == spread.runs else f"{text} ({len(spread.values)} of {spread.runs})"


def at_step(entries: Sequence[Entry], event: str) -> str:
    """Return ``at 20 ± 2`` if all runs ``passed`` or ``collapsed``, else how many did and where."""
    steps = [step for entry in entries if (step := entry.outcomes[event]) is not None]
    if not steps:
        return "never"
    if len(steps) < len(entries):
        return f"{len(steps)} of {len(entries)}, at {', '.join(map(str, steps))}"
    return f"at {fmean(steps):.3g}" + (f" ± {stdev(steps):.2g}" if len(steps) > 1 else "")


def present_outcomes(report: Report) -> list[CatalogOutcome]:
    """Return the outcomes that any run has."""
    return [each for each in OUTCOMES if any(spread[each.name].values for spread in report.spreads.values())]


def label_rows(report: Report) -> list[Row]:
    """Return the rows of the table by label."""
    members = report.by_label.values()
    rows = [
        ("runs", [(str(len(of)), "") for of in members]),
        (f"passes {report.threshold:g}", [(at_step(of, "passed"), "") for of in members]),
        ("collapses", [(at_step(of, "collapsed"), "") for of in members]),
    ]
    present = present_outcomes(report)
    for outcome in (each for each in OUTCOMES if each in present or each.agreement):
        cells = []
        for label, spreads in report.spreads.items():
            text = mean_and_spread(outcome, spreads[outcome.name])
            why = report.unclaimed[label] if outcome.speed and text != NONE else ""
            cells.append((text, why and f"not claimed: {why}"))
        rows.append((outcome.title, cells))
    return rows


def run_rows(report: Report) -> tuple[list[str], list[list]]:
    """Return the names of the columns and one row per run, every number unrounded."""
    names = [outcome.name for outcome in present_outcomes(report)]
    header = ["run", "label", "seed", "name", "source", "steps", "common_steps", "passed_at", "collapsed_at", *names]
    rows = []
    for entry in report.entries:
        run = entry.run
        row = [entry.id, run.label, run.seed, run.name, run.source, len(run.steps), len(report.common)]
        row += [entry.outcomes[name] for name in ("passed", "collapsed", *names)]
        rows.append([*row, *map(run.summary.get, ("wall_s", "peak_memory_gib")), run.departure or report.nospeed])
    return [*header, "wall_s", "peak_memory_gib", "not_claimed"], rows


def write_csv(file: Path, header: Sequence[str], rows: Iterable[Sequence]) -> None:
    """Write the header and the rows, which end with a line feed."""
    with file.open("w", newline="") as content:
        csv.writer(content, lineterminator="\n").writerows([header, *rows])


def write_tables(report: Report, out: Path) -> None:
    """Write ``table.csv`` by label, ``runs.csv`` by run, and ``verdicts.csv`` into ``out``."""
    present = {"passed": False, "collapsed": False} | {each.name: each.speed for each in present_outcomes(report)}
    rows = []
    for label, spreads in report.spreads.items():
        for name, speed in present.items():
            spread = spreads[name]
            bounds = (min(spread.values), max(spread.values)) if spread.values else (None, None)
            why = report.unclaimed[label] if speed else ""
            rows.append([label, name, spread.runs, len(spread.values), spread.mean, spread.std, *bounds, why])
    write_csv(out / "table.csv", ["label", "outcome", "runs", "n", "mean", "std", "min", "max", "not_claimed"], rows)
    write_csv(out / "runs.csv", *run_rows(report))
    write_csv(out / "verdicts.csv", [field.name for field in fields(Verdict)], map(astuple, report.verdicts))


def on_screen(report: Report) -> str:
    """Return for the terminal the table by label, the notes, and the verdicts that separate labels."""
    texts = [["", *report.by_label]]
    for name, cells in label_rows(report):
        texts.append([name, *(f"({text})" if unclaimed else text for text, unclaimed in cells)])
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)) for row in texts]
    separating = [each for each in report.verdicts if each.separates]
    lines += ["", *(f"  {note}" for note in notes(report))]
    lines += ["", *(f"  {TITLES[each.outcome]}: {each.first}, {each.second}: {each.text}" for each in separating)]
    return "\n".join(line.rstrip() for line in lines)


def summary(report: Report) -> str:
    """Return one line on the runs that are compared."""
    counts = ", ".join(f"{label} ({len(members)})" for label, members in report.by_label.items())
    return f"{len(report.entries)} run{'s' * (len(report.entries) > 1)}: {counts}; {step_range(report.common)}."
