"""Plot the figure of a probe: the mismatch of every variant, and the effective sample size against response length."""

import textwrap
from pathlib import Path

import matplotlib
import numpy as np

from verl_precision.probe.mismatch import LENGTHS, lost

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def plot(rows: list[tuple[str, dict]], regimes: list[str], title: str, positions: int, file: Path) -> None:
    """Draw the k3 of every row, and ESS/N of the regimes against response length.

    Args:
        rows: a label and the result of ``mismatch.measure``, in the order of the table.
        regimes: labels of the curves.
        positions: of the model, the longest sequence that it can generate.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    colours = {label: f"C{index}" for index, label in enumerate(regimes)}
    for place, (label, result) in enumerate(reversed(rows)):
        estimate, colour = result["k3"], colours.get(label, "grey")
        left.plot([estimate.low, estimate.high], [place, place], color=colour, linewidth=2, alpha=0.5)
        left.plot(estimate.value, place, "o", color=colour, markersize=5)
    left.set_yticks(range(len(rows)), [label for label, _ in reversed(rows)], fontsize=8)
    left.set(xscale="log", xlabel="k3 per token, nats, and its 95 % interval", title="mismatch")
    left.grid(axis="x", alpha=0.3)

    floor = 1e-9  # fp32's would stretch the axis
    for label, result in rows:
        if label not in colours:
            continue
        points = [point for point in result["curve"] if point["measured"]]
        at, (loss, least, most) = [point["length"] for point in points], lost([point["ess"] for point in points])
        right.vlines(at, np.maximum(least, floor), most, color=colours[label], linewidth=1.5)
        right.plot(at, loss, "o", markersize=4, color=colours[label])
        lengths = np.geomspace(result["block"], LENGTHS[-1], 100)
        loss, least, most = (-np.expm1(-getattr(result["rate"], each) * lengths) for each in ("value", "low", "high"))
        right.plot(lengths, loss, "--", color=colours[label], label=label)
        right.fill_between(lengths, least, most, color=colours[label], alpha=0.2)
    right.axvline(positions, color="grey", linewidth=1, linestyle=":")
    right.annotate(f" the model's {positions} positions", (positions, floor * 1.5), fontsize=8, color="grey")
    right.set(
        xlabel="response length, tokens", ylabel="1 − ESS/N: share of the samples lost", yscale="log", ylim=(floor, 2)
    )
    right.set_xscale("log", base=2)
    right.set_title("sequence weights: measured (points), extrapolated (lines)")
    right.legend(fontsize=8, loc="upper left")
    figure.suptitle(textwrap.fill(title, 170), fontsize=10)
    figure.savefig(file, dpi=120)
    plt.close(figure)
