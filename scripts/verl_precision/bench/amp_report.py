"""Write the report of bench-amp: a table with what it means, the goals of the recipes, and a figure."""

import math
import os
import platform
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median

import torch

from verl_precision.bench.amp_measure import LAST, ArmResult, ratio
from verl_precision.bench.amp_scenarios import ARMS, BASE, SCENARIOS, TF32
from verl_precision.bench.interleave import machine
from verl_precision.bench.resource_usage import PEAK_MEMORY_METHOD
from verl_precision.format import markdown_table, significant

BUSY = 0.05  # of the cores; where other processes use more, times are not to be quoted
GOALS = {
    "at least 1.5 × the throughput in PPO, where the GPU is the bottleneck": (("ppo",), "seconds"),
    "2 to 3 × the speed in training": (tuple(name for name in SCENARIOS if name != "ppo"), "seconds"),
    "40 to 50% less memory": (tuple(SCENARIOS), "memory_mib"),
}


@dataclass(frozen=True)
class Conditions:
    """The machine, the command and its duration, for the report."""

    device: str
    size: str
    command: str
    seconds: float
    others: float  # cores that other processes used meanwhile, on average
    no_tf32: str = "no CUDA device"  # why there is no arm of TF32, "" where there is one


def cpu_extensions() -> str:
    """Return a phrase on the CPU's instructions for 16 bits, by Linux's names."""
    flags = set(re.findall(r"\b(?:avx512_(?:bf16|fp16)|amx_(?:bf16|fp16))\b", Path("/proc/cpuinfo").read_text()))
    return f"for 16 bits the CPU has {', '.join(sorted(flags))}" if flags else "the CPU has no instructions for 16 bits"


def of_arm(rows: list[ArmResult], scenario: str, arm: str) -> list[ArmResult]:
    """Return the repeats of an arm of a scenario."""
    return [row for row in rows if (row.scenario, row.arm) == (scenario, arm)]


def names_in(rows: list[ArmResult], field: str) -> list[str]:
    """Return the measured scenarios or arms, in their order."""
    return list(dict.fromkeys(getattr(row, field) for row in rows))


def markdown(rows: list[ArmResult], conditions: Conditions) -> str:
    """Return the report."""
    names, arms = names_in(rows, "scenario"), names_in(rows, "arm")
    bases, cores = [arm for arm in (BASE, TF32) if arm in arms], os.cpu_count()
    where = machine(conditions.device) + (f" ({cpu_extensions()})" if conditions.device == "cpu" else "")
    lines = [
        "# What 16 bits give to training outside verl",
        "",
        f"Measured by `{conditions.command}` on {where}; {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}; {datetime.now(timezone.utc):%Y-%m-%d}, "
        f"{conditions.seconds / 60:.1f} minutes, in which other processes used {conditions.others:.2f} of "
        f"{cores} cores.",
        "",
    ]
    if conditions.others > BUSY * cores:
        lines += ["**The machine was busy with other work: the times are rough, do not quote them.**", ""]
    lines += [
        f"{1 + max(row.repeat for row in rows)} repeats, each with its own seed. In a repeat the arms have the same "
        "initial weights, data and clipping, and take turns at every update, in an order that is shuffled each round. "
        "Each arm's first two updates are not timed.",
        "",
        f"- speed-up: {BASE}'s seconds per update over the arm's, in the same repeat; median and range over the "
        "repeats. Above 1 is faster. n/a: the arm did not run in its dtype.",
        *[f"- against {TF32}: over the seconds of {BASE} with products in TF32. {BASE} has no TF32."] * (TF32 in bases),
        "- effective dtype: observed in the multiplications of the first forward, with its share of them.",
        f"- memory: {PEAK_MEMORY_METHOD[conditions.device]}. Saved: of {BASE}'s, in the median.",
        f"- first, last: loss or return of the first update, and the mean of the last {LAST}; mean and range over the "
        "repeats.",
        "- overflow: skipped optimizer steps, of all, warm-up included. An update of ppo is a rollout and its steps.",
        "",
    ]
    header = ["scenario", "arm", "effective dtype", "ms an update", "throughput a second", "speed-up"]
    header += [f"against {TF32}"] * (TF32 in bases) + ["memory MiB", "saved", "overflow", "first", "last"]
    header += ["GPU busy"] * (conditions.device == "cuda")
    table, notes = [], []
    for name, arm in ((name, arm) for name in names for arm in arms):
        of = of_arm(rows, name, arm)
        speed, memory = ratio(rows, name, arm, "seconds"), ratio(rows, name, arm, "memory_mib")
        notes += [f"- {name}, {arm}: {speed.reason}"] * bool(speed.reason)
        share = "" if of[0].effective_share is None else f" {min(row.effective_share for row in of):.1%}"
        table.append(
            [
                name,
                arm,
                f"{of[0].effective_dtype}{share}",
                significant(median(row.seconds for row in of) * 1e3),
                f"{significant(median(row.throughput for row in of))} {of[0].unit}",
                *(ratio(rows, name, arm, "seconds", base) if arm not in (BASE, base) else "" for base in bases),
                significant(median(row.memory_mib for row in of)),
                memory.saving if arm != BASE else "",
                f"{sum(row.overflow_steps for row in of)} of {sum(row.optimizer_steps for row in of)}",
                f"{of[0].outcome} {spread([row.first for row in of])}",
                spread([row.last for row in of]),
                *([f"{median(row.gpu_busy for row in of):.0%}"] if conditions.device == "cuda" else []),
            ]
        )
    lines += markdown_table(header, table)
    lines += ["", "## n/a", "", *notes] if notes else []
    lines += ["", "## Sizes", ""]
    for name in names:
        sizes = SCENARIOS[name].sizes[conditions.size]
        lines.append(f"- {name}: {', '.join(f'{key} {value}' for key, value in sizes.items())}")
    left_out = [f"- {name}: left out of this run" for name in SCENARIOS if name not in names]
    left_out += [f"- {TF32}: {conditions.no_tf32}"] * (conditions.device == "cuda" and TF32 not in bases)
    lines += ["", "## Not measured", "", *left_out, "- other sizes, other machines"]
    return "\n".join([*lines, "", "## Goals on a GPU", "", *goals(rows, conditions), ""])


def spread(values: list[float]) -> str:
    """Return their mean and range, or how many of them are not finite."""
    if not all(map(math.isfinite, values)):
        return f"not finite in {sum(not math.isfinite(value) for value in values)} of {len(values)} repeats"
    return f"{significant(fmean(values))} ({significant(min(values))}–{significant(max(values))})"


def goals(rows: list[ArmResult], conditions: Conditions) -> list[str]:
    """Return a line for each goal on a GPU, with what was measured there."""
    if conditions.device == "cpu":
        return [f"- {goal}: not measured, no CUDA device." for goal in GOALS]
    names, bases = names_in(rows, "scenario"), [arm for arm in (BASE, TF32) if arm in names_in(rows, "arm")]
    lines = []
    for goal, (of, field) in GOALS.items():
        pairs = [(name, arm) for name in of if name in names for arm in ARMS if arm != BASE]
        found = []
        for base in bases:
            ratios = [(name, arm, ratio(rows, name, arm, field, base)) for name, arm in pairs]
            shown = (f"{name} {arm} {each if field == 'seconds' else each.saving}" for name, arm, each in ratios)
            found.append(f"against {base} {', '.join(shown)}")
        lines.append(f"- {goal}: {'; '.join(found) if pairs else 'not measured'}.")
    busy = (f"{name} {median(row.gpu_busy for row in of_arm(rows, name, BASE)):.0%}" for name in names)
    return [*lines, f"- the GPU is the bottleneck as far as it computes during an update in {BASE}: {'; '.join(busy)}."]


def plot_ratios(rows: list[ArmResult], title: str, file: Path) -> None:
    """Plot the speed-up and the memory that remains, by scenario and arm; no bar where an arm has no ratio."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names, arms = names_in(rows, "scenario"), [arm for arm in names_in(rows, "arm") if arm != BASE]
    figure, axes = plt.subplots(1, 2, figsize=(10, 1.5 + 0.9 * len(names)), sharey=True, layout="constrained")
    for axis, field in zip(axes, ("seconds", "memory_mib"), strict=True):
        for place, arm in enumerate(arms):
            found, height = [ratio(rows, name, arm, field) for name in names], 0.8 / len(arms)
            values = [each.median if field == "seconds" else 1 / each.median for each in found]
            bars = axis.barh([y + place * height for y in range(len(names))], values, height, label=arm)
            axis.bar_label(bars, ["n/a" if math.isnan(value) else significant(value) for value in values])
        axis.axvline(1.0, color="black", linewidth=0.8)
    axes[0].set(xlabel=f"speed-up over {BASE}, median", yticks=range(len(names)), yticklabels=names)
    axes[1].set(xlabel=f"tensor memory, of {BASE}'s")
    axes[1].legend()
    figure.suptitle(f"Training in 16 bits on {title}")
    figure.savefig(file, dpi=120)
    plt.close(figure)
