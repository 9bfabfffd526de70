"""Compare trainer and rollout, and the trainer with itself, in every variant of a probe, and report the findings."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from verl_precision.files import read_jsonl
from verl_precision.probe.mismatch import LEAST, Answer, measure
from verl_precision.probe.options import ProbeOptions
from verl_precision.probe.recommendation import by_regime, choose, weights_outlook
from verl_precision.probe.variants import Variant
from verl_precision.spelling import spelled

SHOWN = 8192  # tokens of the sequences whose weights the verdict judges


def compare(variants: Iterable[Variant], work: Path) -> list[dict]:
    """Return a row for each variant: what it compares, and ``mismatch.measure`` of that or the ``overflow``."""
    rows = []
    for variant in variants:
        lines = [read_jsonl(file) for file in variant.files(work)]
        overflows = [line["overflow"] for file in reversed(lines) for line in file if "overflow" in line]
        if overflows:
            rows.append(variant.columns() | {"overflow": overflows[0]})
        elif all(lines):  # no trainer has scored a rollout that overflowed, so none is compared with itself
            rows.append(variant.columns() | measure(answers_of(*lines)))
    return rows


def answers_of(scored: list[dict], rolled_out: list[dict]) -> list[Answer]:
    """Return the answers to all prompts, with experts if both sides have them."""
    names = [name for name in ("log_probs", "experts") if name in scored[0] and name in rolled_out[0]]
    answers = []
    for prompt, lines in enumerate(zip(scored, rolled_out, strict=True)):
        columns = [line[name] for name in names for line in lines]  # each has an entry per answer
        answers += [Answer(prompt, *map(np.array, answer)) for answer in zip(*columns, strict=True)]
    return answers


def summarize(options: ProbeOptions, rows: list[dict], positions: int, exact: str | None) -> dict[str, str]:
    """Return the findings by name, the verdict first.

    Args:
        rows: of ``compare``, of trainers and rollouts.
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
