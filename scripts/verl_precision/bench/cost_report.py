"""Report the cost of each regime as CSV and Markdown."""

import csv
import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path

from verl_precision.bench.regimes import BASE, RegimeTiming
from verl_precision.format import markdown_table, number

REGIMES = (BASE, "fp16", "fp16 upstream", "fp32")
PARTS = {
    "optimizer step": "fp32 runs bf16's code: its distance from 1 is the noise. `fp16 upstream` is verl's sequence "
    "(unscale, clip,\nstep, update); with fused AdamW it uses torch's `GradScaler`, because `ShardedGradScaler`, which "
    "verl uses,\nraises there.",
    "training step": "verl's worker on one rank: FSDP2 with fp32 masters, forward, loss, backward and optimizer step. "
    "fp32 without TF32.",
}
CALLS = ("launches", "synchronizations", "host_reads")


def write(rows: list[RegimeTiming], device_name: str, stem: Path) -> list[Path]:
    """Write ``stem`` with the suffixes .csv and .md, and return the two paths."""
    table, report = (stem.with_name(f"{stem.name}.{suffix}") for suffix in ("csv", "md"))
    stem.parent.mkdir(parents=True, exist_ok=True)
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(RegimeTiming)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    report.write_text(markdown(rows, device_name))
    return [table, report]


def markdown(rows: list[RegimeTiming], device_name: str) -> str:
    """Return the report."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "verl"))
    lines = ["# What fp16 costs", ""]
    lines += [f"Measured by `make bench` on {device_name}; Python {platform.python_version()}, {versions}.", ""]
    lines += ["Ratios are to bf16 in the same round, the median over at least 41 rounds of an optimizer step or"]
    lines += ["11 of a training step; below 1 is faster.", ""]
    for part, text in PARTS.items():
        measured = [row for row in rows if row.part == part and not row.left_out]
        if not measured:
            continue
        lines += [f"## {part.capitalize()}", "", text, "", *regime_table(measured, time_cell, BASE + " ms")]
        if part != "optimizer step":
            lines += ["Peak memory above the weights, in GiB:", ""]
            lines += regime_table(measured, lambda row: number(row.peak_gib, ".2f"))
        if any(row.launches is not None for row in measured):
            lines += ["Kernel launches / synchronizations of the host with the GPU / values that the host reads from a"]
            lines += ["tensor, of one call, counted by torch's profiler:", ""]
            lines += regime_table(measured, lambda row: " / ".join(number(getattr(row, name), "d") for name in CALLS))
    if left_out := [f"- {row.name}, {row.regime}: {row.left_out}" for row in rows if row.left_out]:
        lines += ["## Left out", "", *left_out, ""]
    return "\n".join(lines[:-1]) + "\n"


def time_cell(row: RegimeTiming) -> str:
    """Return bf16's time in ms, and another regime's ratio to it, or its time where bf16 was left out."""
    if row.regime == BASE:
        return f"{row.seconds * 1e3:.1f}"
    return f"{row.ratio:.3f}" if row.ratio is not None else f"{row.seconds * 1e3:.1f} ms"


def regime_table(rows: list[RegimeTiming], cell: Callable[[RegimeTiming], str], base: str = BASE) -> list[str]:
    """Return a table of one part, a row per configuration and a column per regime, and an empty line."""
    count, subject = ("tokens", "model") if rows[0].tokens else ("ranks", "optimizer")
    regimes = [regime for regime in REGIMES if any(row.regime == regime for row in rows)]
    cells = []
    for _, same in groupby(rows, lambda row: row.name):
        by_regime = {row.regime: row for row in same}
        first = next(iter(by_regime.values()))
        shown = [cell(by_regime[regime]) if regime in by_regime else "" for regime in regimes]
        cells.append([first.subject, f"{first.parameters_m:g}", getattr(first, count), *shown])
    header = [subject, "M parameters", count, *(base if each == BASE else each for each in regimes)]
    return [*markdown_table(header, cells), ""]
