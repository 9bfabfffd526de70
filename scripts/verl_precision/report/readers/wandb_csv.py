"""Read wandb's CSV exports.

A run's history has ``_step`` and a column a metric; a chart has ``Step`` and columns ``RUN - METRIC``, and a folder may
contain one chart a metric. ``FILE.csv#RUN`` names one of several runs.
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
    """Return the file and the run of ``FILE.csv#RUN``; "" where no run is named."""
    before, _, name = str(path).partition(".csv#")
    return (Path(f"{before}.csv"), name) if name else (path, "")


def read_csv(label: str, path: Path) -> LoggedRun:
    """Read an export, a folder of exports, or one run of several in a file.

    Raises:
        Refused: there is no run, or there are several and none is named.
    """
    place, wanted = split_run_name(path)
    files = [place] if place.is_file() else sorted(place.glob("*.csv"))
    logged: dict[int, dict[str, float]] = {}
    names: set[str] = set()
    of_oat = False
    for file in files:
        for step, data, name in csv_rows(file, wanted):
            names.add(name)
            of_oat |= OAT_ROUND in data
            logged.setdefault(int(data.get(OAT_ROUND, step)), {}).update(data)
    if len(names) > 1:
        raise Refused(f"{path}: contains {len(names)} runs, {', '.join(sorted(names))}; choose one: FILE.csv#RUN")
    if not names:
        raise Refused(f"{path}: contains no run {wanted or 'at all'}")
    steps = {step: select_metrics(data, str(path)) for step, data in logged.items()}
    source = "wandb's CSV export, of OAT" if of_oat else "wandb's CSV export"
    return LoggedRun(label, names.pop(), source, steps, adapt_oat_metrics(steps, {}) if of_oat else ())


def csv_rows(file: Path, wanted: str) -> Iterator[tuple[int, dict[str, float], str]]:
    """Yield for each line and run the step, the metrics and the run's name.

    Args:
        wanted: the only run to be read, "" for all.

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
            by_run: dict[str, dict[str, float]] = {}
            for column, (run, metric) in used.items():
                if row[column] is None:
                    raise Refused(f"{file}: line {table.line_num} is truncated: {column} is missing")
                if row[column] and (not wanted or run == wanted):
                    where = f"{file}: line {table.line_num}, {column}"
                    by_run.setdefault(run, {})[metric] = parse_number(row[column], where)
            step = int(parse_number(row[axis], f"{file}: line {table.line_num}, {axis}"))
            yield from ((step, data, run) for run, data in by_run.items())


def chart_column(column: str) -> re.Match | None:
    """Match ``RUN - METRIC`` of a metric that a report uses, but not the bounds of a chart's groups."""
    match = CHART.fullmatch(column)
    return match if match and report_name(match["metric"]) and not match["bound"] else None


def parse_number(text: str, where: str) -> float:
    """Return the number.

    Raises:
        Refused: ``text`` is none; the message begins with ``where``.
    """
    try:
        return float(text)
    except ValueError as error:
        raise Refused(f"{where}: {text!r} is not a number") from error
