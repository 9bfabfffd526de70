"""Draw the figures of a report: each series over the steps, and the outcomes of each run, as SVG and PNG."""

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from verl_precision.facts.metrics import LOSS_SCALE, REWARD, SKIPPED
from verl_precision.report.catalog import ACCURACY, SERIES, Series, Steps
from verl_precision.report.report import Report
from verl_precision.report.tables import present_outcomes

# Okabe and Ito's colours, which colour-blind readers distinguish; a regime has the same in every report.
COLOURS = {"fp16": "#0072B2", "bf16": "#D55E00", "bf16_train_fp16_infer": "#009E73", "fp32": "#4D4D4D"}
OTHERS = ("#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7B4FA3", "#1B7F79")
LONGEST_LABEL = 28  # letters of a label in a figure
STYLE = {
    "svg.hashsalt": "report",
    "svg.fonttype": "none",  # text stays text: half the size
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e7e7e7",
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "legend.frameon": False,
}


def colours(labels: Sequence[str]) -> dict[str, str]:
    """Return by label its colour."""
    others = iter(OTHERS * len(labels))
    return {label: COLOURS.get(label) or next(others) for label in labels}


def short(label: str) -> str:
    """Return the label, cut to ``LONGEST_LABEL`` letters."""
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"


def centre(values: list[float], scale: str) -> tuple[float, float, float]:
    """Return the mean and one standard deviation below and above; on a log scale the geometric ones."""
    if scale == "linear":
        middle, wide = fmean(values), stdev(values) if len(values) > 1 else 0.0
        return middle, middle - wide, middle + wide
    logs = [math.log(value) for value in values]
    middle, wide = fmean(logs), stdev(logs) if len(logs) > 1 else 0.0
    return math.exp(middle), math.exp(middle - wide), math.exp(middle + wide)


def write_figures(report: Report, out: Path) -> None:
    """Write ``figures/NAME.svg`` and ``.png`` into ``out``; the same runs give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    (out / "figures").mkdir()
    with matplotlib.rc_context(STYLE):
        for series in drawn_series(report):
            figure = Figure(figsize=(5.6, 3.1), layout="constrained")
            draw(report, series, figure.add_subplot())
            save(figure, out / "figures" / series.name)
        figure = Figure(figsize=(9.6, 2.9), layout="constrained")
        draw_outcomes(report, figure)
        save(figure, out / "figures" / "outcomes")


def save(figure, stem: Path) -> None:
    """Write a figure as SVG and PNG, small enough to commit: coordinates to a hundredth of a point, 256 colours."""
    from PIL import Image

    content = io.StringIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), content.getvalue())
    stem.with_suffix(".svg").write_text(text)
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", dpi=120)
    image = Image.open(pixels).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(stem.with_suffix(".png"), optimize=True)


def drawn_series(report: Report) -> list[Series]:
    """Return the series that have a point in a figure; of counts those that are not 0 throughout."""
    values = {
        series: [value for entry in report.entries for value in curve(entry.run.steps, series).values()]
        for series in SERIES
    }
    return [series for series, several in values.items() if (any(several) if series.counted else several)]


def drawable(value: float, scale: str) -> bool:
    """Return whether an axis has the value: it is finite, and on a log scale positive, as a rounded k3 may not be."""
    return math.isfinite(value) and (scale == "linear" or value > 0)


def curve(steps: Steps, series: Series) -> dict[int, float]:
    """Return by step what a figure shows of a run: its finite values, above 0 on a log scale; counts summed up."""
    points, total = {}, 0.0
    for step in sorted(steps):
        value = steps[step].get(series.metric, math.nan)
        if drawable(value, series.scale):
            total = total + value if series.counted else value
            points[step] = total
    return points


def draw(report: Report, series: Series, axis) -> None:
    """Draw a thin line a run, a thick one for the mean over a label's seeds, and a band of one standard deviation."""
    if series.scale != "linear":
        axis.set_yscale("log", base=2 if series.scale == "log2" else 10)
    few = {"marker": "."} if series.metric == ACCURACY else {}  # evaluations, of which one alone has no line
    for label, colour in colours(report.labels).items():
        members = report.of(label)
        lines = [curve(entry.run.steps, series) for entry in members]
        if not any(lines):
            continue  # such as fp32's k3, which is 0
        for line in lines:
            alpha = 0.4 if len(members) > 1 else 1
            axis.plot(list(line), list(line.values()), color=colour, linewidth=0.7, alpha=alpha, **few)
        shared = [curve(entry.shared, series) for entry in members]
        steps = [step for step in report.common if all(step in line for line in shared)]
        if steps and len(members) > 1:
            centres = [centre([line[step] for line in shared], series.scale) for step in steps]
            middle, low, high = zip(*centres, strict=True)
            if not series.counted:
                axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            axis.plot(steps, middle, color=colour, linewidth=1.8, **few)
        axis.plot([], [], color=colour, linewidth=2.4, label=short(label))
    if series.metric == REWARD:
        axis.axhline(report.threshold, color="#888888", linewidth=0.9, linestyle=(0, (4, 3)))
    if series.metric == LOSS_SCALE:
        mark_skipped_steps(report, series, axis)
    widen_if_flat(axis)
    axis.set_xlabel("step")
    axis.set_ylabel(series.title, fontsize=8)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=8, borderaxespad=0.2, handlelength=1.4)


def mark_skipped_steps(report: Report, series: Series, axis) -> None:
    """Draw a cross at each skipped step of the actor."""
    for entry in report.entries:
        line = curve(entry.run.steps, series)
        skips = [step for step, data in entry.run.steps.items() if data.get(SKIPPED, 0) > 0 and step in line]
        axis.plot(skips, [line[step] for step in skips], "x", color="#B00020", markersize=5)


def widen_if_flat(axis) -> None:
    """Leave room around values that are about equal: rounding would look like a curve."""
    low, high = axis.dataLim.intervaly
    if axis.get_yscale() == "log":
        low = axis.dataLim.minposy
    if high - low > 1e-3 * max(abs(low), abs(high)):
        return
    axis.set_autoscaley_on(False)
    if axis.get_yscale() == "log":
        axis.set_ylim(low / 2, high * 2)
    else:
        axis.set_ylim(low - 0.05 * abs(low) - 0.5, high + 0.05 * abs(high) + 0.5)


def draw_outcomes(report: Report, figure) -> None:
    """Draw the outcomes that matter most: a dot a run, a bar for the mean."""
    wanted = ("reward_last", "k3_mean", "probs_diff_mean", "throughput_median")
    chosen = [outcome for outcome in present_outcomes(report) if outcome.name in wanted]
    for outcome, axis in zip(chosen, figure.subplots(1, len(chosen), squeeze=False)[0], strict=True):
        several = [value for label in report.labels for value in report.spreads[label][outcome.name].values]
        if outcome.scale == "log" and not outcome.speed and max(several) > 0:
            axis.set_yscale("log")
        for place, (label, colour) in enumerate(colours(report.labels).items()):
            values = report.spreads[label][outcome.name].values
            hollow = outcome.speed and report.unclaimed[label]
            offsets = [place + 0.08 * (index - (len(values) - 1) / 2) for index in range(len(values))]
            axis.plot(offsets, values, "o", color=colour, markersize=5, markerfacecolor="none" if hollow else colour)
            if len(values) > 1:
                middle = centre(list(values), outcome.scale if min(values) > 0 else "linear")[0]
                axis.plot([place - 0.25, place + 0.25], [middle, middle], color=colour, linewidth=1.6)
        widen_if_flat(axis)
        axis.set_title(outcome.title, fontsize=9)
        axis.set_xticks(range(len(report.labels)), list(map(short, report.labels)), rotation=20, ha="right", fontsize=8)
        axis.set_xlim(-0.6, len(report.labels) - 0.4)
        axis.grid(axis="x", visible=False)
