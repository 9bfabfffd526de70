"""Read metrics by step from JSON lines, as verl's file logger, ``make run`` and OAT write them, and select by name."""

import json
import math
from pathlib import Path
from statistics import fmean

from verl_precision.errors import Refused
from verl_precision.report.catalog import Steps, report_name


def read_json(file: Path) -> dict:
    """Return the content of a JSON file, or refuse what is not JSON."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise Refused(f"{file}: is not JSON: {error}") from error


def select_metrics(data: dict, where: str) -> dict[str, float]:
    """Return the metrics of one step that a report uses, under its names; null, which stands for NaN, as NaN.

    Several names of one metric, as verl has for several sets of validation data, give their mean.

    Args:
        where: the file and line of ``data``, for errors.

    Raises:
        Refused: a value is not a number.
    """
    values: dict[str, list[float]] = {}
    for name, value in data.items():
        if (metric := report_name(name)) is None:
            continue
        if value is not None and not isinstance(value, int | float):
            raise Refused(f"{where}: {name} is {value!r}, not a number")
        values.setdefault(metric, []).append(float(value) if value is not None and math.isfinite(value) else math.nan)
    return {metric: fmean(several) for metric, several in values.items()}


def read_metric_lines(file: Path) -> tuple[Steps, tuple[str, ...]]:
    """Read lines ``{"step": int, "data": {name: value}}``.

    Returns:
        The steps, and a note if the last line is half-written.

    Raises:
        Refused: another line is broken.
    """
    steps: Steps = {}
    lines = file.read_text(errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            step, data = int(row["step"]), dict(row["data"])
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith("\n"):
                return steps, (f"the last line of {file.name}, line {number}, is half-written: left out",)
            raise Refused(f"{file}: line {number} is not a line of metrics: {line.strip()[:60]!r}") from error
        if selected := select_metrics(data, f"{file}: line {number}"):
            steps.setdefault(step, {}).update(selected)
    return steps, ()
