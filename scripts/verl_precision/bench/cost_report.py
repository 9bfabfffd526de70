"""Report the cost of each regime as CSV, Markdown and a figure."""

import csv
import importlib.metadata
import platform
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path

from verl_precision.bench.regime_timing import BASE, RegimeTiming
from verl_precision.format import number

REGIMES = (BASE, "fp16", "fp16 upstream", "fp32")
NEEDED = {"norm": 4, "step": 28}  # bytes per parameter: read g; read p, g, m, v and write p, m, v; all in fp32
STEP_TEXT = (
    "fp32 runs bf16's code: its distance from 1 is the noise. `fp16 upstream` is verl's sequence (unscale, clip,\n"
    "step, update); with fused AdamW it takes torch's `GradScaler`, because `ShardedGradScaler`, which verl uses,\n"
    "raises there."
)
PASSES = {
    "forward and backward": "Decoder layers whose weights are of the regime's dtype, as FSDP2 casts them, under the "
    "autocast of verl's\nengine. No head, no loss, no optimizer. fp32 without TF32.",
    "training step": "verl's worker on one rank: FSDP2 with fp32 masters, forward, loss, backward and optimizer step. "
    "fp32 without TF32.",
}
CALLS = {"cuda": ("launches", "synchronizations", "host_copies"), "cpu": ("operators", "host_reads")}
CALLS_TEXT = {
    "cuda": "Kernel launches / synchronizations of the host with the GPU / copies from the GPU to the host, of one "
    "call, counted by\ntorch's profiler.",
    "cpu": "Operators / values that the host reads from a tensor, of one call, counted by torch's profiler. Kernel "
    "launches and\nsynchronizations: not measured, no CUDA device.",
}


def write(
    rows: list[RegimeTiming], traffic: dict[tuple[str, str], float], device: str, machine: str, files: list[Path]
) -> list[Path]:
    """Write the CSV and Markdown ``files``, and the PNG where optimizer steps were measured, and return their paths.

    Args:
        traffic: bytes per parameter, by optimizer and regime.
        machine: its name, for titles.
    """
    table_file, report, figure = files
    table_file.parent.mkdir(parents=True, exist_ok=True)
    with table_file.open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(RegimeTiming)], lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(row) for row in rows)
    report.write_text(markdown(rows, traffic, device, machine))
    steps = [row for row in rows if row.what == "optimizer step" and not row.left_out]
    if not steps:
        return files[:2]
    plot(steps, machine, figure)
    return files


def table(header: list[str], rows: list[list[object]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty one."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in [header, *rows]]
    return [lines[0], "|" + "---|" * len(header), *lines[1:], ""]


def markdown(rows: list[RegimeTiming], traffic: dict[tuple[str, str], float], device: str, machine: str) -> str:
    """Return the report."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "verl")}
    lines = [
        "# What fp16 costs",
        "",
        f"Measured by `make bench` on {machine}; Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ".",
        "",
        "Ratios are to bf16 in the same round, the median over the rounds; below 1 is faster.",
        "",
    ]
    measured = [row for row in rows if not row.left_out]
    if steps := [row for row in measured if row.what == "optimizer step"]:
        lines += ["## Optimizer step", "", STEP_TEXT, "", *step_table(steps)]
    for what, text in PASSES.items():
        if of := [row for row in measured if row.what == what]:
            lines += [f"## {what.capitalize()}", "", text, "", *pass_table(of)]
        elif device == "cpu" and steps:
            lines += [f"## {what.capitalize()}", "", "Not measured: no CUDA device.", ""]
    if reasons := [row for row in rows if row.left_out]:
        lines += ["## Left out", "", *(f"- {row.name}, {row.regime}: {row.left_out}" for row in reasons), ""]
    if counted := [row for row in measured if row.operators is not None]:
        lines += ["## What the host asks of the device", "", CALLS_TEXT[device], "", *calls_table(counted, device)]
    if traffic:
        lines += [
            "## Bytes moved a parameter",
            "",
            "Counted over the operators of a step, every tensor that one reads and every one that it writes. Needed "
            f"are {NEEDED['norm']} for the norm and {NEEDED['step']} for one pass of AdamW: {sum(NEEDED.values())}.",
            "",
        ]
        names = dict.fromkeys(name for name, _ in traffic)
        lines += table(
            ["optimizer", *REGIMES], [[n, *(f"{traffic[n, regime]:.1f}" for regime in REGIMES)] for n in names]
        )
    return "\n".join(lines).rstrip("\n") + "\n"


def configurations(rows: list[RegimeTiming]) -> list[list[RegimeTiming]]:
    """Return the rows of each configuration, in their order."""
    return [list(same) for _, same in groupby(rows, lambda row: row.name)]


def step_table(rows: list[RegimeTiming]) -> list[str]:
    """Return a table of optimizer steps: a row per configuration, with the ratios of the regimes."""
    header = ["optimizer", "M parameters", "ranks", f"{BASE} ms", *REGIMES[1:], "rounds"]
    cells = []
    for first, *others in configurations(rows):
        cells += [[first.optimizer, f"{first.parameters_m:g}", first.ranks, f"{first.seconds * 1e3:.1f}"]]
        cells[-1] += [*(f"{row.ratio:.3f}" for row in others), first.rounds]
    return table(header, cells)


def pass_table(rows: list[RegimeTiming]) -> list[str]:
    """Return a table of passes: a row per configuration and regime."""
    header = ["model", "M parameters", "tokens", "regime", "ms", f"× {BASE}", "tokens a second"]
    cells = [
        [row.model, f"{row.parameters_m:g}", row.tokens, row.regime, f"{row.seconds * 1e3:.2f}"]
        + [number(row.ratio, ".3f"), round(row.tokens / row.seconds), f"{row.peak_gib:.2f}", row.rounds]
        for row in rows
    ]
    return table([*header, "peak GiB above the weights", "rounds"], cells)


def calls_table(rows: list[RegimeTiming], device: str) -> list[str]:
    """Return a table of the host's calls: a row per configuration, a column per regime."""
    regimes = [regime for regime in REGIMES if any(row.regime == regime for row in rows)]
    cells = []
    for same in configurations(rows):
        by_regime = {row.regime: " / ".join(number(getattr(row, name), "d") for name in CALLS[device]) for row in same}
        cells += [[same[0].name, *(by_regime.get(regime, "") for regime in regimes)]]
    return table(["", *regimes], cells)


def plot(steps: list[RegimeTiming], title: str, file: Path) -> None:
    """Draw the ratios to bf16 over the sizes: a panel per optimizer, a line per regime, dashed for two ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    optimizers = list(dict.fromkeys(row.optimizer for row in steps))
    figure, axes = plt.subplots(1, len(optimizers), figsize=(10, 4), sharey=True, layout="constrained", squeeze=False)
    colours = {"fp16": "tab:blue", "fp16 upstream": "tab:red", "fp32": "tab:grey"}
    for axis, optimizer in zip(axes[0], optimizers, strict=True):
        axis.axhline(1.0, color="black", linewidth=0.8)
        for regime, colour in colours.items():
            for ranks, style in zip(sorted({row.ranks for row in steps}), ("o-", "s--"), strict=False):
                line = [r for r in steps if (r.optimizer, r.regime, r.ranks) == (optimizer, regime, ranks)]
                label = f"{regime}, {ranks} rank{'s' * (ranks > 1)}"
                axis.plot([r.parameters_m for r in line], [r.ratio for r in line], style, color=colour, label=label)
        axis.set(title=optimizer, xlabel="million parameters", xscale="log")
        axis.set_xticks(
            sorted({row.parameters_m for row in steps}), [f"{s:g}" for s in sorted({r.parameters_m for r in steps})]
        )
        axis.minorticks_off()
    axes[0, 0].set_ylabel("time of the optimizer step, × bf16")
    axes[0, 0].legend(fontsize="small", ncols=2)
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    plt.close(figure)
