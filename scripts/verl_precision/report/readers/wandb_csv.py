"""Read W&B's CSV exports.

A run's history has ``_step`` and a column per metric. A chart has ``Step`` and columns ``RUN - METRIC``; a folder may
contain one chart per metric. ``FILE.csv#RUN`` selects one of several runs.
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.report.catalog import report_name
from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.readers.metrics import select_metrics
from verl_precision.report.readers.oat import OAT_ROUND, adapt_oat_metrics

CHART = re.compile(r"(?P<run>.+) - (?P<metric>[^-]+?)(?P<bound>__MIN|__MAX)?")


def split_run_name(path: Path) -> tuple[Path, str]:
    """Return the file and the run of ``FILE.csv#RUN``; "" if no run is named."""
    before, _, name = str(path).partition(".csv#")
    return (Path(f"{before}.csv"), name) if name else (path, "")


def read_csv(label: str, path: Path) -> LoggedRun:
    """Read an export, a folder of exports, or one run of several in a file.

    Raises:
        Refused: there is no run, or there are several and none is named.
    """
    place, wanted = split_run_name(path)
    runs: dict[str, dict[int, dict[str, float]]] = {}
    for file in [place] if place.is_file() else sorted(place.glob("*.csv")):
        for run, step, data in csv_rows(file):
            runs.setdefault(run, {}).setdefault(int(data.get(OAT_ROUND, step)), {}).update(data)
    names = [name for name in runs if name == wanted or not wanted]
    if len(names) > 1:
        raise Refused(f"{path}: contains {len(names)} runs, {', '.join(sorted(names))}; choose one: FILE.csv#RUN")
    if not names:
        raise Refused(f"{path}: contains no run {wanted or 'at all'}")
    logged = runs[names[0]]
    steps = {step: select_metrics(data, str(path)) for step, data in logged.items()}
    if any(OAT_ROUND in data for data in logged.values()):
        return LoggedRun(label, names[0], "W&B's CSV export, of OAT", steps, adapt_oat_metrics(steps, {}))
    return LoggedRun(label, names[0], "W&B's CSV export", steps)


def csv_rows(file: Path) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield for each line and run the run's name, the step and the metrics.

    Raises:
        Refused: there is no column of steps, a line is truncated, or a cell is not a number.
    """
    with file.open(newline="") as content:
        table = csv.DictReader(content)
        columns = table.fieldnames or []
        axis = next((name for name in ("_step", "Step", "trainer/global_step", "step") if name in columns), None)
        if axis is None:
            raise Refused(f"{file}: has no column of steps (_step or Step); it has {', '.join(columns[:6]) or 'none'}")
        used = {column: (match["run"], match["metric"]) for column in columns if (match := chart_column(column))}
        used |= {column: (file.stem, column) for column in columns if report_name(column) or column == OAT_ROUND}
        for row in table:
            line = f"{file}: line {table.line_num}"
            numbers: dict[str, float] = {}
            for column in (axis, *used):
                if (text := row[column]) is None:
                    raise Refused(f"{line} is truncated: {column} is missing")
                if text or column == axis:
                    try:
                        numbers[column] = float(text)
                    except ValueError as error:
                        raise Refused(f"{line}, {column}: {text!r} is not a number") from error
            by_run: dict[str, dict[str, float]] = {}
            for column, (run, metric) in used.items():
                if column in numbers:
                    by_run.setdefault(run, {})[metric] = numbers[column]
            yield from ((run, int(numbers[axis]), data) for run, data in by_run.items())


def chart_column(column: str) -> re.Match | None:
    """Match ``RUN - METRIC`` of a metric that a report uses, but not the bounds of a chart's groups."""
    match = CHART.fullmatch(column)
    return match if match and report_name(match["metric"]) and not match["bound"] else None
