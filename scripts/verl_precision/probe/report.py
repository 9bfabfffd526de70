"""Compare trainer and rollout in every variant of a probe, and report the mismatch."""

import dataclasses
import json
import textwrap
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np

from verl_precision.files import read_jsonl, write_json
from verl_precision.format import markdown_table
from verl_precision.probe.log_probs import Variant
from verl_precision.probe.mismatch import Answer, effective_share, measure
from verl_precision.probe.model import ProbeOptions
from verl_precision.probe.page import publish
from verl_precision.probe.recommendation import by_regime, choose, weights_outlook
from verl_precision.spelling import spelled

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLUMNS = (512, 8192, 32768)  # response lengths in the table
SHOWN = 8192  # the length of the sequences whose weights the verdict judges


def compare(variants: Iterable[Variant], work: Path) -> list[dict]:
    """Return a row for each variant: what it compares, and ``mismatch.measure`` of that or the ``overflow``."""
    rows = []
    for variant in variants:
        scored, rolled_out = files = [read_jsonl(file) for file in variant.files(work)]
        overflows = [line["overflow"] for file in reversed(files) for line in file if "overflow" in line]
        if overflows:
            rows.append(variant.columns() | {"overflow": overflows[0]})
            continue
        answers = []
        for prompt, lines in enumerate(zip(scored, rolled_out, strict=True)):
            pairs = zip(*(line["log_probs"] for line in lines), strict=True)
            answers += [Answer(prompt, np.array(trainer), np.array(rollout)) for trainer, rollout in pairs]
        rows.append(variant.columns() | measure(answers))
    return rows


def summarize(options: ProbeOptions, rows: list[dict], positions: int) -> dict[str, str]:
    """Return the findings by name, the verdict first; ``positions`` are the model's."""
    findings = {"verdict": verdict(by_regime(rows))}
    if (options.wire[0], options.head[0]) != ("fp32", "none"):
        findings["verdict"] += f" (weights sent as {options.wire[0]}, fp32 head: {options.head[0]})"
    measured = [row for row in rows if "overflow" not in row]
    if measured:
        block, longest = min(row["block"] for row in measured), max(row["longest"] for row in measured)
        findings["measured"] = (
            f"{options.rows} prompts, {options.samples} answers to each of "
            f"{measured[0]['tokens'] / measured[0]['sequences']:.1f} tokens on average, at temperature "
            f"{options.temperature:g}; {options.backend} on {options.device}"
        )
        findings["extrapolated"] = (
            f"ESS/N: from the variance of sums of {block} tokens (the longest answer has {longest}), assuming the same "
            "growth in longer sums; the intervals are the sampling error of that variance only. The model has "
            f"{positions} positions"
        )
    if growing := [label(row) for row in measured if row["growth"].low > 1]:
        findings["not independent"] = (
            f"sums of {block} tokens vary more than independent terms would in {'; '.join(growing)}: "
            "longer ones may do so even more, and ESS/N be lower than extrapolated"
        )
    return findings


def verdict(regimes: dict[str, dict]) -> str:
    """Return the verdict on the 16-bit regimes, from the row of each, as one sentence."""
    overflows = {name: row["overflow"] for name, row in regimes.items() if "overflow" in row}
    measured = {name: row for name, row in regimes.items() if name != "fp32" and name not in overflows}
    parts = [choose(measured)[1]]
    if bitwise := [f"{row['tokens']} tokens in {name}" for name, row in measured.items() if row["equal"].value == 1]:
        parts = [f"bitwise: trainer and rollout have the same log-probabilities of all {' and '.join(bitwise)}"]
    elif measured:
        outlooks = ", ".join(weights_outlook(row, SHOWN) for row in measured.values())
        parts.append(f"untruncated sequence weights {outlooks}")
    command = spelled("make preflight")
    return "; ".join(parts + [f"{name} overflows: {text} ({command})" for name, text in overflows.items()])


def label(row: dict) -> str:
    """Return the name of a row of trainer and rollout, such as ``fp16, bf16 wire``."""
    wire = "" if row["wire"] == "fp32" else f", {row['wire']} wire"
    sides = row["fp32_head"]
    head = "" if sides == "none" else f", fp32 head {'on' if sides == 'both' else 'of'} {sides}"
    return row["regime"] + wire + head


def table(rows: list[dict]) -> list[list[str]]:
    """Return the table of the measured ``rows``, headings first."""
    numbers = ["k3, nats a token (95 %)", "mean |Δp|", *(f"ESS/N at {length}" for length in COLUMNS)]
    lines = [["regime", "wire", "fp32 head", *numbers, "bitwise equal (95 %)"]]
    for row in rows:
        variant = [row["regime"], row["wire"], row["fp32_head"]]
        lines.append([*variant, row["overflow"], *[""] * len(numbers)] if "overflow" in row else variant + cells(row))
    return lines


def cells(row: dict) -> list[str]:
    ess = [effective_share(row["rate"], length).text(".3f") for length in COLUMNS]
    equal = "bitwise" if row["equal"].value == 1 else row["equal"].text(".2%")
    return [row["k3"].text(".2g"), f"{row['probs_diff'].value:.2g}", *ess, equal]


def write(options: ProbeOptions, report: dict) -> None:
    """Write the report's ``.md``, ``.json`` and, unless every variant overflowed, ``.png``, and print it."""
    findings, (headings, *rows) = report["findings"], table(report["rows"])
    write_json(options.report(".json"), json.loads(json.dumps(report, default=dataclasses.asdict)))
    blocks = [markdown_table(headings, rows)]
    if measured := [row for row in report["rows"] if "overflow" not in row]:
        figure = options.report(".png")
        plot(measured, f"{options.name}: {findings['verdict']}", figure)
        blocks.append([f"![k3 of each line]({figure.name})"])
    title = f"Mismatch of {options.name} before training ({options.backend})"
    publish(options.report(".md"), title, findings, *blocks)


def plot(rows: list[dict], title: str, file: Path) -> None:
    """Draw the k3 of every row and its interval, each regime's in a color."""
    figure, axes = plt.subplots(figsize=(7, 5.5), layout="constrained")
    regimes = list(by_regime(rows))
    for place, row in enumerate(reversed(rows)):
        color, k3 = f"C{regimes.index(row['regime'])}", row["k3"]
        axes.hlines(place, k3.low, k3.high, color=color, linewidth=2, alpha=0.5)
        axes.plot(k3.value, place, "o", color=color, markersize=5)
    axes.set_yticks(range(len(rows)), [label(row) for row in reversed(rows)], fontsize=8)
    axes.set(xscale="log", xlabel="k3 per token, nats, and its 95 % interval")
    axes.set_title(textwrap.fill(title, 90), fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=120)
    plt.close(figure)
