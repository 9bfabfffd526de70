"""Format a report: the page ``index.html`` from ``page.html.jinja``, tables as CSV, and a table for the terminal."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from verl_precision.format import number, significant
from verl_precision.report.catalog import OUTCOMES, WINDOW, CatalogOutcome
from verl_precision.report.content import Entry, Report, notes, step_range
from verl_precision.report.figures import colors, drawn_series
from verl_precision.report.statistics import ERROR, LEAST_SEEDS, Spread, Verdict

NONE = "–"
TITLES = {outcome.name: outcome.title for outcome in OUTCOMES}
METHOD = (
    "Mean ± sample standard deviation over the seeds. There is a verdict if Welch's interval excludes equality, with "
    f"at least {LEAST_SEEDS} seeds on each side. The error of all verdicts on one outcome together is at most "
    f"{ERROR:.0%} (Bonferroni); outcomes are not corrected for one another. The mismatch is compared by the ratio of "
    "geometric means, other outcomes by difference, speed not at all."
)


def page(report: Report) -> str:
    """Return the page as HTML; it refers only to files in its folder."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["number"] = number
    environment.filters["significant"] = lambda value, digits=3: NONE if value is None else significant(value, digits)
    return environment.get_template("page.html.jinja").render(
        report=report,
        notes=notes(report),
        colors=colors(list(report.by_label)),
        rows=label_rows(report),
        figures=drawn_series(report),
        titles=TITLES,
        differs=config_by_label(report),
        method=METHOD,
        window=WINDOW,
        common=step_range(report.common),
    )


def config_by_label(report: Report) -> dict[str, list[str]]:
    """Return for each key of the configuration in which runs differ its values, by label."""
    rows = {}
    for key, values in report.differs.items():
        by_label = [[values[entry.id] for entry in of if entry.id in values] for of in report.by_label.values()]
        texts = [", ".join(dict.fromkeys(NONE if value is None else value for value in of)) for of in by_label]
        rows[key] = [text or NONE for text in texts]  # the other framework has no such key
    return rows


def mean_and_spread(outcome: CatalogOutcome, spread: Spread) -> str:
    """Return ``0.960 ± 0.003``, and the number of runs that have a value if some have none."""
    if not spread.values:
        return NONE
    form = outcome.form
    text = format(spread.mean, form) if form else significant(spread.mean)
    if spread.std is not None:
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


def label_rows(report: Report) -> list[tuple[str, list[str]]]:
    """Return the rows of the table by label: a name, and a text for each label."""
    members = report.by_label.values()
    rows = [
        ("runs", [str(len(of)) for of in members]),
        (f"passes {report.threshold:g}", [at_step(of, "passed") for of in members]),
        ("collapses", [at_step(of, "collapsed") for of in members]),
    ]
    for outcome in present_outcomes(report):
        rows.append((outcome.title, [mean_and_spread(outcome, of[outcome.name]) for of in report.spreads.values()]))
    return rows


def outcome_rows(report: Report) -> list[tuple]:
    """Return for each run and outcome the run, its label, its seed, the outcome and its value, unrounded."""
    names = ("passed", "collapsed", *(outcome.name for outcome in present_outcomes(report)))
    return [(of.id, of.run.label, of.run.seed, name, of.outcomes[name]) for of in report.entries for name in names]


def write_tables(report: Report, out: Path) -> None:
    """Write ``outcomes.csv``, a line per run and outcome, and ``verdicts.csv`` into ``out``."""
    header = ("run", "label", "seed", "outcome", "value")
    for name, rows in (
        ("outcomes", [header, *outcome_rows(report)]),
        ("verdicts", [Verdict._fields, *report.verdicts]),
    ):
        with (out / f"{name}.csv").open("w", newline="") as content:
            csv.writer(content, lineterminator="\n").writerows(rows)


def on_screen(report: Report) -> str:
    """Return for the terminal the table by label, the notes, and the verdicts that separate labels."""
    texts = [["", *report.by_label], *([name, *cells] for name, cells in label_rows(report))]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)) for row in texts]
    separating = [each for each in report.verdicts if each.separates]
    lines += ["", *(f"  {note}" for note in notes(report))]
    lines += ["", *(f"  {TITLES[each.outcome]}: {each.first}, {each.second}: {each.text}" for each in separating)]
    return "\n".join(line.rstrip() for line in lines)
