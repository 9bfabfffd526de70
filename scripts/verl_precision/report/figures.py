"""Draw the figures of a report, one per series over the steps, as SVG and PNG."""

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev

from verl_precision.facts.metrics import LOSS_SCALE, REWARD, SKIPPED
from verl_precision.report.catalog import ACCURACY, SERIES, Series, Steps, finite
from verl_precision.report.content import Report

# Okabe and Ito's colors, which color-blind readers distinguish; a regime has the same in every report.
COLORS = {"fp16": "#0072B2", "bf16": "#D55E00", "bf16_train_fp16_infer": "#009E73", "fp32": "#4D4D4D"}
OTHERS = ("#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7B4FA3", "#1B7F79")
STYLE = {
    "svg.hashsalt": "report",
    "svg.fonttype": "none",  # text stays text: half the size
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e7e7e7",
    "legend.frameon": False,
}


def colors(labels: Sequence[str]) -> dict[str, str]:
    """Return the color of each label."""
    others = iter(OTHERS * len(labels))
    return {label: COLORS.get(label) or next(others) for label in labels}


def center(values: Sequence[float], scale: str) -> tuple[float, float, float]:
    """Return the mean and one standard deviation below and above; on a log scale the geometric ones."""
    if scale != "linear":
        middle, low, high = center([math.log(value) for value in values], "linear")
        return math.exp(middle), math.exp(low), math.exp(high)
    middle, wide = fmean(values), stdev(values) if len(values) > 1 else 0.0
    return middle, middle - wide, middle + wide


def write_figures(report: Report, out: Path) -> None:
    """Write ``figures/NAME.svg`` and ``.png`` into ``out``; the same runs give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    (out / "figures").mkdir()
    with matplotlib.rc_context(STYLE):
        for series in drawn_series(report):
            figure = Figure(figsize=(5.6, 3.5), layout="constrained")
            draw(report, series, figure.add_subplot())
            figure.savefig(out / "figures" / f"{series.name}.svg", metadata={"Date": None})
            figure.savefig(out / "figures" / f"{series.name}.png", dpi=120)


def drawn_series(report: Report) -> list[Series]:
    """Return the series that have a point in a figure; of counts those that are not 0 throughout."""

    def is_drawn(series: Series) -> bool:
        values = [value for entry in report.entries for value in curve(entry.run.steps, series).values()]
        return any(values) if series.counted else bool(values)

    return list(filter(is_drawn, SERIES))


def curve(steps: Steps, series: Series) -> dict[int, float]:
    """Return what a figure shows of a run: finite values by step, above 0 on a log scale; counts summed up.

    A k3 that rounding made negative is thus left out.
    """
    values = finite(steps, series.metric)
    if series.counted:
        return dict(zip(values, accumulate(values.values()), strict=True))
    return {step: value for step, value in values.items() if series.scale == "linear" or value > 0}


def draw(report: Report, series: Series, axis) -> None:
    """Draw a thin line per run, a thick one for the mean over a label's seeds, and a band of one standard deviation."""
    if series.scale != "linear":
        axis.set_yscale("log", base=2 if series.scale == "log2" else 10)
    few = {"marker": "."} if series.metric == ACCURACY else {}  # a single evaluation has no line
    palette = colors(list(report.by_label))
    for label, members in report.by_label.items():
        lines = [curve(entry.run.steps, series) for entry in members]
        if not any(lines):
            continue  # such as fp32's k3, which is 0
        for line in lines:
            alpha = 0.4 if len(members) > 1 else 1
            axis.plot(list(line), list(line.values()), color=palette[label], linewidth=0.7, alpha=alpha, **few)
        shared = [curve(entry.shared, series) for entry in members]
        steps = [step for step in report.common if all(step in line for line in shared)]
        if steps and len(members) > 1:
            centers = [center([line[step] for line in shared], series.scale) for step in steps]
            middle, low, high = zip(*centers, strict=True)
            if not series.counted:
                axis.fill_between(steps, low, high, color=palette[label], alpha=0.15, linewidth=0)
            axis.plot(steps, middle, color=palette[label], linewidth=1.8, **few)
        axis.plot([], [], color=palette[label], linewidth=2.4, label=label)
    if series.metric == REWARD:
        axis.axhline(report.threshold, color="#888888", linewidth=0.9, linestyle=(0, (4, 3)))
    if series.metric == LOSS_SCALE:  # a cross at each skipped step
        for entry in report.entries:
            line = curve(entry.run.steps, series)
            skips = [step for step, data in entry.run.steps.items() if data.get(SKIPPED, 0) > 0 and step in line]
            axis.plot(skips, [line[step] for step in skips], "x", color="#B00020", markersize=5)
    widen_if_flat(axis)
    axis.set_xlabel("step")
    axis.set_ylabel(series.title, fontsize=10)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=10, borderaxespad=0.2, handlelength=1.4)


def widen_if_flat(axis) -> None:
    """Leave room around values that are about equal, whose rounding would look like a curve."""
    low, high = axis.dataLim.intervaly
    if high - low <= 1e-3 * max(abs(low), abs(high)):
        room = 0.5 + 0.05 * abs(high)
        axis.set_autoscaley_on(False)  # or matplotlib warns of equal limits
        axis.set_ylim(*((low / 2, 2 * high) if axis.get_yscale() == "log" else (low - room, high + room)))
