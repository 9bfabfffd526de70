"""Format a report: the page ``index.html`` from ``page.html.jinja``, tables as CSV, and a table for the terminal."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from verl_precision.format import number, significant
from verl_precision.report.catalog import OUTCOMES, WINDOW, CatalogOutcome
from verl_precision.report.content import Entry, Report, notes, step_range
from verl_precision.report.figures import colors, drawn_series
from verl_precision.report.logged_run import LoggedRun
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
        summary=summary(report),
        colors=colors(list(report.by_label)),
        rows=label_rows(report),
        figures=drawn_series(report),
        titles=TITLES,
        differs=config_by_label(report),
        method=METHOD,
        window=WINDOW,
        common=step_range(report.common),
        provenance={entry.id: provenance(entry.run) for entry in report.entries},
    )


def summary(report: Report) -> str:
    """Return one line on the runs that are compared."""
    counts = ", ".join(f"{label} ({len(members)})" for label, members in report.by_label.items())
    return f"{len(report.entries)} run{'s' * (len(report.entries) > 1)}: {counts}; {step_range(report.common)}."


def config_by_label(report: Report) -> dict[str, list[str]]:
    """Return for each key of the configuration in which runs differ its values, by label."""
    rows = {}
    for key, values in report.differs.items():
        by_label = [[values[entry.id] for entry in of if entry.id in values] for of in report.by_label.values()]
        texts = [", ".join(dict.fromkeys(NONE if value is None else value for value in of)) for of in by_label]
        rows[key] = [text or NONE for text in texts]  # the other framework has no such key
    return rows


def provenance(run: LoggedRun) -> dict[str, str]:
    """Return where a run is from, as far as it is recorded."""
    settings = [f"{name}={value}" for name, value in run.settings.items() if name not in ("PRECISION", "SEED")]
    stamp = run.summary.get("patch_stamp")
    release = f"{stamp['release']}, stack {stamp['stack']}" if isinstance(stamp, dict) else json.dumps(stamp)
    facts = {
        "from": f"{run.source}: {run.name}",
        "regime named": run.regime or "none",
        "settings": " ".join(settings),
        run.framework: release if stamp else "not recorded",
    }
    for role, reported in run.effective_dtypes.items():
        dtypes = reported if isinstance(reported, dict) else {"its workers differ": json.dumps(reported)}
        facts[f"{role}, as reported"] = ", ".join(f"{name} {value}" for name, value in dtypes.items())
    versions = ", ".join(f"{name} {value}" for name, value in run.summary.get("versions", {}).items())
    return {name: text for name, text in (facts | {"versions": versions or "not recorded"}).items() if text}


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


def run_rows(report: Report) -> tuple[list[str], list[list]]:
    """Return the names of the columns and one row per run, every number unrounded."""
    names = [outcome.name for outcome in present_outcomes(report)]
    header = ["run", "label", "seed", "name", "source", "steps", "common_steps", "passed_at", "collapsed_at", *names]
    rows = []
    for entry in report.entries:
        run = entry.run
        row = [entry.id, run.label, run.seed, run.name, run.source, len(run.steps), len(report.common)]
        row += [entry.outcomes[name] for name in ("passed", "collapsed", *names)]
        rows.append([*row, *map(run.summary.get, ("wall_s", "peak_memory_gib")), run.departure])
    return [*header, "wall_s", "peak_memory_gib", "departure"], rows


def write_tables(report: Report, out: Path) -> None:
    """Write ``table.csv`` by label, ``runs.csv`` by run, and ``verdicts.csv`` into ``out``."""
    rows = []
    for label, spreads in report.spreads.items():
        for name in ("passed", "collapsed", *(each.name for each in present_outcomes(report))):
            spread = spreads[name]
            bounds = (min(spread.values), max(spread.values)) if spread.values else (None, None)
            rows.append([label, name, spread.runs, len(spread.values), spread.mean, spread.std, *bounds])
    write_csv(out / "table.csv", ["label", "outcome", "runs", "n", "mean", "std", "min", "max"], rows)
    write_csv(out / "runs.csv", *run_rows(report))
    write_csv(out / "verdicts.csv", Verdict._fields, report.verdicts)


def write_csv(file: Path, header: Sequence[str], rows: Iterable[Sequence]) -> None:
    with file.open("w", newline="") as content:
        csv.writer(content, lineterminator="\n").writerows([header, *rows])


def on_screen(report: Report) -> str:
    """Return for the terminal the table by label, the notes, and the verdicts that separate labels."""
    texts = [["", *report.by_label], *([name, *cells] for name, cells in label_rows(report))]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)) for row in texts]
    separating = [each for each in report.verdicts if each.separates]
    lines += ["", *(f"  {note}" for note in notes(report))]
    lines += ["", *(f"  {TITLES[each.outcome]}: {each.first}, {each.second}: {each.text}" for each in separating)]
    return "\n".join(line.rstrip() for line in lines)
