"""Write the report of bench_amp in Markdown: table, sizes, goals, and the scenarios that were not measured."""

import math
import os
import platform
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median

import torch

from verl_precision.bench.amp_measure import LAST, ArmResult, arms_in, scenarios_in
from verl_precision.bench.amp_ratio import memory_of, ratio, seconds_of
from verl_precision.bench.amp_scenarios import ARMS, BASE, SCENARIOS, TF32
from verl_precision.bench.interleave import machine
from verl_precision.bench.resource_usage import PEAK_MEMORY_METHOD
from verl_precision.format import significant

SHORT = [arm for arm in ARMS if arm != BASE]  # in 16 bits
BUSY = 0.05  # of the cores; where other processes use more, times are not to be quoted


@dataclass(frozen=True)
class Conditions:
    """The machine, the command and its duration, for the report.

    Attributes:
        others: cores that other processes used meanwhile, on average.
        no_tf32: why there is no arm of TF32, "" where there is one.
    """

    device: str
    size: str
    command: str
    seconds: float
    others: float
    no_tf32: str = "no CUDA device"


def cpu_extensions() -> str:
    """Return a phrase on the CPU's instructions for 16 bits, by Linux's names."""
    flags = set(re.findall(r"\b(?:avx512_(?:bf16|fp16)|amx_(?:bf16|fp16))\b", Path("/proc/cpuinfo").read_text()))
    return f"for 16 bits the CPU has {', '.join(sorted(flags))}" if flags else "the CPU has no instructions for 16 bits"


def markdown(rows: list[ArmResult], conditions: Conditions) -> str:
    """Return the report."""
    names = scenarios_in(rows)
    repeats = 1 + max(row.repeat for row in rows)
    cores = os.cpu_count()
    columns = "scenario, arm, effective dtype, ms an update, throughput a second, speed-up".split(", ")
    columns += [f"against {TF32}"] * (TF32 in arms_in(rows))
    columns += "memory MiB, saved, overflow, first, last".split(", ") + ["GPU busy"] * (conditions.device == "cuda")
    arms, bases = arms_in(rows), bases_in(rows)
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
    tf32 = f"- against {TF32}: over {TF32}'s seconds, which is {BASE} with products in TF32. {BASE} has no TF32."
    tf32 = [tf32] if TF32 in bases else []
    if conditions.others > BUSY * cores:
        lines += ["**The machine was busy with other work: the times are rough, do not quote them.**", ""]
    lines += [
        f"{repeats} repeats, each with its own seed. In a repeat the arms have the same first weights, the same data "
        "and the same clipping, and take turns at every update, in an order that is shuffled each round. Each arm's "
        "first two updates are not timed.",
        "",
        f"- speed-up: {BASE}'s seconds an update over the arm's, in the same repeat; the median over the repeats, and "
        "their range. Above 1 is faster. n/a: the arm did not run in its dtype.",
        *tf32,
        "- effective dtype: what the multiplications of the first forward were done in, and their share, as observed.",
        f"- memory: {PEAK_MEMORY_METHOD[conditions.device]}. Saved: of {BASE}'s, in the median.",
        f"- first, last: the loss or the return of the first update, and the mean of the last {LAST}; mean over the "
        "repeats, and their range.",
        "- overflow: optimizer steps that were skipped, of all, warm-up too: so many less to learn from. An update of "
        "ppo is a rollout and all optimizer steps on it.",
        "",
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
    ]
    notes: list[str] = []
    for name in names:
        for arm in arms:
            of = [row for row in rows if (row.scenario, row.arm) == (name, arm)]
            speed, memory_ratio = ratio(rows, name, arm, seconds_of), ratio(rows, name, arm, memory_of)
            if speed.reason:
                notes.append(f"- {name}, {arm}: {speed.reason}")
            share = "" if of[0].effective_share is None else f" {min(row.effective_share for row in of):.1%}"
            cells = [
                name,
                arm,
                f"{of[0].effective_dtype}{share}",
                significant(median(row.seconds for row in of) * 1e3),
                f"{significant(median(row.throughput for row in of))} {of[0].unit}",
                *(ratio(rows, name, arm, seconds_of, base) if arm not in (BASE, base) else "" for base in bases),
                significant(median(row.memory_mib for row in of)),
                memory_ratio.less if arm != BASE else "",
                f"{sum(row.overflow_steps for row in of)} of {sum(row.optimizer_steps for row in of)}",
                f"{of[0].outcome} {spread([row.first for row in of])}",
                spread([row.last for row in of]),
            ]
            if conditions.device == "cuda":
                cells.append(f"{median(row.gpu_busy for row in of):.0%}")
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "## n/a", "", *notes] if notes else []
    lines += ["", "## Sizes", "", *(f"- {sized(name, conditions.size)}" for name in names)]
    lines += [
        "",
        "## Not measured",
        "",
        *(f"- {name}: left out of this run" for name in SCENARIOS if name not in names),
        *[f"- {TF32}: {conditions.no_tf32}"] * (conditions.device == "cuda" and TF32 not in bases),
    ]
    lines += [f"- other sizes, other machines{'; a GPU: there is none here' if conditions.device == 'cpu' else ''}"]
    lines += ["", "## Goals on a GPU", "", *goals(rows, conditions)]
    return "\n".join(lines) + "\n"


def bases_in(rows: list[ArmResult]) -> list[str]:
    """Return the arms to which those in 16 bits are compared."""
    return [arm for arm in (BASE, TF32) if arm in arms_in(rows)]


def sized(name: str, size: str) -> str:
    """Return a line on the scenario's size."""
    return f"{name}: " + ", ".join(f"{key} {value}" for key, value in SCENARIOS[name].sizes[size].items())


def spread(values: list[float]) -> str:
    """Return their mean and range, or how many of them are not finite."""
    if not all(map(math.isfinite, values)):
        return f"not finite in {sum(not math.isfinite(value) for value in values)} of {len(values)} repeats"
    return f"{significant(fmean(values))} ({significant(min(values))}–{significant(max(values))})"


def goals(rows: list[ArmResult], conditions: Conditions) -> list[str]:
    """Return a line for each goal on a GPU, with what was measured there."""
    trained = [name for name in SCENARIOS if name != "ppo"]
    hoped = {
        "at least 1.5 × the throughput in PPO, where the GPU is the bottleneck": (["ppo"], seconds_of, str),
        "2 to 3 × the speed in training": (trained, seconds_of, str),
        "40 to 50% less memory": (list(SCENARIOS), memory_of, lambda found: found.less),
    }
    lines = []
    for goal, (names, of, shown) in hoped.items():
        measured = [name for name in names if name in scenarios_in(rows)]
        found = []
        for base in bases_in(rows):
            ratios = [f"{name} {arm} {shown(ratio(rows, name, arm, of, base))}" for name in measured for arm in SHORT]
            found.append(f"against {base} {', '.join(ratios)}")
        if conditions.device == "cpu":
            lines.append(f"- {goal}: not measured, no CUDA device.")
        else:
            lines.append(f"- {goal}: {'; '.join(found) if measured else 'not measured'}.")
    if conditions.device == "cuda":
        busy = {
            name: median(r.gpu_busy for r in rows if (r.scenario, r.arm) == (name, BASE)) for name in scenarios_in(rows)
        }
        shares = "; ".join(f"{name} {share:.0%}" for name, share in busy.items())
        lines.append(f"- the GPU is the bottleneck as far as it computes during an update in {BASE}: {shares}.")
    return lines
