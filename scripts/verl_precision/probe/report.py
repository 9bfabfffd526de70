"""Compare trainer and rollout in every regime of a probe, and report the mismatch."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from verl_precision.files import read_jsonl, write_json
from verl_precision.format import markdown_table
from verl_precision.probe.log_probs import dtypes_of, files_of
from verl_precision.probe.mismatch import Answer, effective_share, measure
from verl_precision.probe.model import ProbeOptions
from verl_precision.probe.page import publish
from verl_precision.probe.recommendation import by_regime, choose, weights_outlook
from verl_precision.spelling import spelled

COLUMNS = (512, 8192, 32768)  # response lengths in the table
SHOWN = 8192  # the length of the sequences whose weights the verdict judges


def compare(regimes: Iterable[str], work: Path) -> list[dict]:
    """Return a row for each regime: its dtypes, and ``mismatch.measure`` of its two sides or the ``overflow``."""
    rows = []
    for regime in regimes:
        row = {"regime": regime} | dict(zip(("train", "infer"), dtypes_of(regime), strict=True))
        scored, rolled_out = files = [read_jsonl(file) for file in files_of(regime, work)]
        overflows = [line["overflow"] for file in reversed(files) for line in file if "overflow" in line]
        if overflows:
            rows.append(row | {"overflow": overflows[0]})
            continue
        answers = []
        for prompt, lines in enumerate(zip(scored, rolled_out, strict=True)):
            pairs = zip(*(line["log_probs"] for line in lines), strict=True)
            answers += [Answer(prompt, np.array(trainer), np.array(rollout)) for trainer, rollout in pairs]
        rows.append(row | measure(answers))
    return rows


def summarize(options: ProbeOptions, rows: list[dict], positions: int) -> dict[str, str]:
    """Return the findings by name, the verdict first; ``positions`` are the model's."""
    findings = {"verdict": verdict(by_regime(rows))}
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
    if growing := [row["regime"] for row in measured if row["growth"].low > 1]:
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


def table(rows: list[dict]) -> list[list[str]]:
    """Return the table of the measured ``rows``, headings first."""
    numbers = ["k3, nats a token (95 %)", "mean |Δp|", *(f"ESS/N at {length}" for length in COLUMNS)]
    lines = [["regime", *numbers, "bitwise equal (95 %)"]]
    for row in rows:
        cells = [row["overflow"], *[""] * len(numbers)] if "overflow" in row else numbers_of(row)
        lines.append([row["regime"], *cells])
    return lines


def numbers_of(row: dict) -> list[str]:
    ess = [effective_share(row["rate"], length).text(".3f") for length in COLUMNS]
    equal = "bitwise" if row["equal"].value == 1 else row["equal"].text(".2%")
    return [row["k3"].text(".2g"), f"{row['probs_diff'].value:.2g}", *ess, equal]


def write(options: ProbeOptions, report: dict) -> None:
    """Write the report's ``.md`` and ``.json``, and print it."""
    write_json(options.report(".json"), json.loads(json.dumps(report, default=dataclasses.asdict)))
    headings, *rows = table(report["rows"])
    title = f"Mismatch of {options.name} before training ({options.backend})"
    publish(options.report(".md"), title, report["findings"], markdown_table(headings, rows))
