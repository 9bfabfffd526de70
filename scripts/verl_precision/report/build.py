"""Build a report from runs, write it, and rebuild it from the runs that it keeps.

``index.html`` and ``figures/``; ``table.csv`` and ``table.md`` by label, ``runs.csv`` by run, ``verdicts.csv``; and in
``runs/`` the runs themselves, cut down to what a report reads: a report on those is the same, number for number.
"""

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.files import check_room, write_json
from verl_precision.report.catalog import OUTCOMES, outcomes
from verl_precision.report.figures import write_figures
from verl_precision.report.logged_run import LoggedRun, departure
from verl_precision.report.notes import config_differences, notes
from verl_precision.report.page import page
from verl_precision.report.readers.config import read_json
from verl_precision.report.readers.dispatch import read_all
from verl_precision.report.readers.run_folder import RECORD, record
from verl_precision.report.report import Entry, Report, spread_over, step_range
from verl_precision.report.statistics import THRESHOLD, collapsed, passed, verdicts
from verl_precision.report.tables import write_tables

SETTINGS = "report.json"  # the title, the labels and the runs of a report


def build_report(
    several: Sequence[LoggedRun], threshold: float, title: str, expected: Sequence[str] = (), nospeed: str = ""
) -> Report:
    """Return the report on runs.

    Args:
        threshold: the reward that the moving mean has to exceed.
        expected: labels that should have runs; those without are named.
        nospeed: why no speed may be claimed for any run, such as a machine that was shared.

    Raises:
        Refused: the runs have no step in common.
    """
    labels = tuple(dict.fromkeys(run.label for run in several))
    ordered = [run for label in labels for run in several if run.label == label]
    common = sorted(set.intersection(*(set(run.steps) for run in ordered)))
    if not common:
        ranges = ", ".join(f"{run.label}={run.name} has {step_range(run.steps)}" for run in ordered)
        raise Refused(f"the runs have no step in common: {ranges}")
    entries = []
    for name, run in zip(ids(ordered), ordered, strict=True):
        shared = {step: run.steps[step] for step in common}
        entries.append(
            Entry(
                id=name,
                run=run,
                shared=shared,
                outcomes=outcomes(shared),
                passed=passed(run.steps, threshold),
                collapsed=collapsed(run.steps),
                departure=departure(run),
            )
        )
    by_label = {label: [entry for entry in entries if entry.run.label == label] for label in labels}
    spreads = {
        label: {of.name: spread_over(members, [entry.outcomes[of.name] for entry in members]) for of in OUTCOMES}
        for label, members in by_label.items()
    }
    departures = {
        label: next((f"{entry.id}: {entry.departure}" for entry in members if entry.departure), "")
        for label, members in by_label.items()
    }
    unclaimed = {label: why or nospeed for label, why in departures.items()}
    without = tuple(label for label in dict.fromkeys(expected) if label not in labels)
    return Report(
        title=title,
        threshold=threshold,
        labels=labels,
        without=without,
        entries=tuple(entries),
        common=tuple(common),
        notes=tuple(notes(entries, by_label, common, without, nospeed)),
        spreads=spreads,
        departures=departures,
        nospeed=nospeed,
        unclaimed=unclaimed,
        verdicts=tuple(verdicts(spreads, unclaimed)),
        differs=config_differences(entries),
    )


def ids(ordered: list[LoggedRun]) -> list[str]:
    """Return a name for each run, none twice."""
    names, seen = [], Counter()
    for run in ordered:
        seen[run.label] += 1
        name = f"{run.label}-{seen[run.label]}" if run.seed is None else f"{run.label}-seed{run.seed}"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def write_report(
    pairs: Sequence[tuple[str, Path]],
    out: Path,
    threshold: float = THRESHOLD,
    title: str = "Runs compared",
    expected: Sequence[str] = (),
    nospeed: str = "",
) -> Report:
    """Read the runs, each a label and its folder or file, and replace the report in ``out``.

    Args:
        expected: labels that should have runs, in the order in which they are shown.
        nospeed: why no speed may be claimed for any run.

    Raises:
        Refused: a run cannot be used, there is none, or ``out`` contains something else or cannot be written to;
            nothing is changed then.
    """
    if not pairs:
        raise Refused("RUNS: there is no run to report on")
    if out.exists() and not out.is_dir() or out.is_dir() and any(out.iterdir()) and not (out / SETTINGS).exists():
        raise Refused(f"OUT={out}: is not empty and contains no report; choose another folder")
    check_room(out)
    places = list(expected)
    several = sorted(
        read_all(list(pairs)), key=lambda run: places.index(run.label) if run.label in places else len(places)
    )
    report = build_report(several, threshold, title, expected, nospeed)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        for part, write in (("tables", write_tables), ("figures", write_figures), ("runs", write_runs)):
            print(f"writing {part}", flush=True)
            write(report, new)
        (new / "index.html").write_text(page(report))
        if out.exists():
            os.replace(out, Path(scratch, "old"))
        os.replace(new, out)
    return report


def write_runs(report: Report, out: Path) -> None:
    """Write the runs, cut down to what a report reads, and ``report.json``, from which the report is rebuilt."""
    for entry in report.entries:
        folder = out / "runs" / entry.id
        folder.mkdir(parents=True)
        lines = [
            json.dumps({"step": step, "data": {k: None if math.isnan(v) else v for k, v in data.items()}})
            for step, data in sorted(entry.run.steps.items())
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        for name, content in (("run.json", entry.run.run), ("summary.json", entry.run.summary)):
            if content:
                write_json(folder / name, content)
        config = {key: value for key, value in entry.run.config.items() if key in report.differs}
        write_json(folder / RECORD, record(entry.run) | {"config": config})
    settings = {
        "title": report.title,
        "threshold": report.threshold,
        "nospeed": report.nospeed,
        "labels": [*report.labels, *report.without],
        "runs": [[entry.run.label, f"runs/{entry.id}"] for entry in report.entries],
    }
    write_json(out / SETTINGS, settings)


def rebuild(folder: Path, out: Path) -> Report:
    """Write the report of ``folder`` anew, from the runs that its ``report.json`` names.

    Raises:
        Refused: ``folder`` contains no report; as :func:`write_report`.
    """
    file = folder / SETTINGS
    if not file.is_file():
        below = sorted(str(each.parent) for each in folder.rglob(SETTINGS)) if folder.is_dir() else []
        hint = f"; below it are {', '.join(below)}" if below else ""
        raise Refused(f"FROM={folder}: contains no {SETTINGS}{hint}; give the folder of a report")
    settings = read_json(file)
    if missing := [name for name in ("title", "threshold", "nospeed", "labels", "runs") if name not in settings]:
        raise Refused(f"{file}: has no {missing[0]}; it is not a report's")
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in settings["runs"]):
        raise Refused(f"{file}: runs must be a list of [LABEL, FOLDER]")
    pairs = [(label, folder / run) for label, run in settings["runs"]]
    return write_report(pairs, out, settings["threshold"], settings["title"], settings["labels"], settings["nospeed"])
