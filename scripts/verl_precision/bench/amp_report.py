"""Write the report of bench-amp: a table with what it means."""

import math
import platform
from datetime import datetime, timezone
from statistics import fmean, median

import torch

from verl_precision.bench.amp_measure import LAST, ArmResult
from verl_precision.bench.amp_scenarios import BASE, SCENARIOS, TF32
from verl_precision.bench.measurement import PEAK_MEMORY_METHOD, machine
from verl_precision.format import markdown_table, significant


def of_arm(rows: list[ArmResult], scenario: str, arm: str) -> list[ArmResult]:
    """Return the repeats of an arm of a scenario."""
    return [row for row in rows if (row.scenario, row.arm) == (scenario, arm)]


def ratios(rows: list[ArmResult], scenario: str, arm: str, field: str, base: str = BASE) -> list[float]:
    """Return the base's ``field`` over the arm's in each repeat; none where one computed in another dtype."""
    pairs = list(zip(of_arm(rows, scenario, base), of_arm(rows, scenario, arm), strict=True))
    if any(row.effective_dtype != row.requested_dtype for pair in pairs for row in pair):
        return []
    return [getattr(first, field) / getattr(other, field) for first, other in pairs]


def speed_up(rows: list[ArmResult], scenario: str, arm: str, base: str = BASE) -> str:
    """Return how many times faster than the base the arm is: median and range over the repeats."""
    values = ratios(rows, scenario, arm, "seconds", base)
    return f"{significant(median(values))} ({significant(min(values))}–{significant(max(values))})" if values else "n/a"


def saved(rows: list[ArmResult], scenario: str, arm: str, base: str = BASE) -> str:
    """Return how much less memory than the base the arm needs, in percent."""
    values = ratios(rows, scenario, arm, "memory_mib", base)
    return f"{1 - 1 / median(values):.0%}" if values else "n/a"


def markdown(rows: list[ArmResult], device: str, size: str, command: str, seconds: float) -> str:
    """Return the report of a ``command`` that took so many seconds on ``device``, "cpu" or "cuda"."""
    names = list(dict.fromkeys(row.scenario for row in rows))
    arms = list(dict.fromkeys(row.arm for row in rows))
    bases = [arm for arm in (BASE, TF32) if arm in arms]
    lines = [
        "# What 16 bits give to training outside verl",
        "",
        f"Measured by `{command}` on {machine(device)}; {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}; {datetime.now(timezone.utc):%Y-%m-%d}, "
        f"{seconds / 60:.1f} minutes.",
        "",
        f"{len({row.seed for row in rows})} repeats, each with its own seed. In a repeat the arms have the same "
        "initial weights, data and clipping, and take turns at every update, in an order that is shuffled each round. "
        "Each arm's first two updates are not timed.",
        "",
        f"- speed-up: {BASE}'s seconds per update over the arm's, in the same repeat; median and range over the "
        "repeats. Above 1 is faster. n/a: the arm or the base did not run in its dtype.",
        *[f"- against {TF32}: over the seconds of {BASE} with products in TF32. {BASE} has no TF32."] * (TF32 in bases),
        "- effective dtype: observed in the multiplications of the first forward, with its share of them.",
        f"- memory: {PEAK_MEMORY_METHOD[device]}. Saved: of {BASE}'s, in the median.",
        f"- first, last: loss or return of the first update, and the mean of the last {LAST}; mean and range over the "
        "repeats.",
        "- overflow: skipped optimizer steps, of all, warm-up included. An update of ppo is a rollout and its steps.",
        "",
    ]
    header = ["scenario", "arm", "effective dtype", "ms an update", "throughput a second", "speed-up"]
    header += [f"against {TF32}"] * (TF32 in bases) + ["memory MiB", "saved", "overflow", "first", "last"]
    table = []
    for name, arm in ((name, arm) for name in names for arm in arms):
        of = of_arm(rows, name, arm)
        share = "" if of[0].effective_share is None else f" {min(row.effective_share for row in of):.1%}"
        cells = [
            name,
            arm,
            f"{of[0].effective_dtype}{share}",
            significant(median(row.seconds for row in of) * 1e3),
            f"{significant(median(row.throughput for row in of))} {SCENARIOS[name].unit}",
            *(speed_up(rows, name, arm, base) if arm not in (BASE, base) else "" for base in bases),
            significant(median(row.memory_mib for row in of)),
            saved(rows, name, arm) if arm != BASE else "",
            f"{sum(row.overflow_steps for row in of)} of {sum(row.optimizer_steps for row in of)}",
            f"{SCENARIOS[name].outcome} {spread([row.first for row in of])}",
            spread([row.last for row in of]),
        ]
        table.append(cells)
    lines += [*markdown_table(header, table), "", "## Sizes", ""]
    for name in names:
        sizes = SCENARIOS[name].sizes[size]
        lines.append(f"- {name}: {', '.join(f'{key} {value}' for key, value in sizes.items())}")
    return "\n".join([*lines, ""])


def spread(values: list[float]) -> str:
    """Return their mean and range, or how many of them are not finite."""
    if not all(map(math.isfinite, values)):
        return f"not finite in {sum(not math.isfinite(value) for value in values)} of {len(values)} repeats"
    return f"{significant(fmean(values))} ({significant(min(values))}–{significant(max(values))})"
