"""Summarize what each regime costs, and report it as Markdown."""

import importlib.metadata
import platform
from statistics import median
from typing import NamedTuple

from verl_precision.format import markdown_table, number

BASE = "bf16"
PARTS = {
    "optimizer step": "fp32 runs bf16's code: its distance from 1 is the noise. `fp16 upstream` is verl's sequence "
    "(unscale, clip,\nstep, update); with fused AdamW it uses torch's `GradScaler`, because `ShardedGradScaler`, which "
    "verl uses,\nraises there.",
    "training step": "verl's worker on one rank: FSDP2 with fp32 masters, forward, loss, backward and optimizer step. "
    "fp32 without TF32. `fp32 head`: `keep_fp32_modules=[lm_head]`.",
}


class RegimeTiming(NamedTuple):
    """The time of one regime in one configuration."""

    part: str  # of PARTS
    subject: str  # the optimizer, or the model
    parameters_m: float  # in millions
    regime: str
    seconds: float  # median over the rounds
    ratio: float | None  # median of the ratio to bf16 in the same round, None without bf16


def timings_of(times: dict[str, list[float]], part: str, subject: str, parameters_m: float) -> list[RegimeTiming]:
    """Summarize the seconds of each regime by round, and print them as a line."""
    rows = []
    for regime, taken in times.items():
        ratio = median(t / b for t, b in zip(taken, times[BASE], strict=True)) if BASE in times else None
        rows.append(RegimeTiming(part, subject, parameters_m, regime, median(taken), ratio))
    shown = ", ".join(f"{row.regime} {row.seconds * 1e3:.1f} ms" for row in rows)
    print(f"{part}, {subject}, {parameters_m:g} M: {shown}", flush=True)
    return rows


def markdown(rows: list[RegimeTiming], left_out: list[str], device_name: str) -> str:
    """Return the report; ``left_out``: what was not measured and why."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "verl"))
    lines = ["# What fp16 costs", ""]
    lines += [f"Measured by `make bench` on {device_name}; Python {platform.python_version()}, {versions}.", ""]
    lines += ["Ratios are to bf16 in the same round, the median over at least 41 rounds of an optimizer step or"]
    lines += ["11 of a training step; below 1 is faster."]
    for part, text in PARTS.items():
        cells = [
            [row.subject, f"{row.parameters_m:g}", row.regime, f"{row.seconds * 1e3:.1f}", number(row.ratio, ".3f")]
            for row in rows
            if row.part == part
        ]
        if cells:
            table = markdown_table(["subject", "M parameters", "regime", "ms", "× bf16"], cells)
            lines += ["", f"## {part.capitalize()}", "", text, "", *table]
    if left_out:
        lines += ["", "## Left out", "", *(f"- {each}" for each in left_out)]
    return "\n".join(lines) + "\n"
