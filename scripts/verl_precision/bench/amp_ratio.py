"""Compute the speed-up and the saved memory of an arm: ratios to fp32, or to TF32, in the same repeat."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from verl_precision.bench.amp_measure import ArmResult
from verl_precision.bench.amp_scenarios import BASE
from verl_precision.format import significant


@dataclass(frozen=True)
class Ratio:
    """The base's value over an arm's in the same repeat: the median over the repeats and the range, or why not."""

    median: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str = ""

    @property
    def less(self) -> str:
        """Return the arm's saving, in percent."""
        return "n/a" if self.reason else f"{1 - 1 / self.median:.0%}"

    def __str__(self) -> str:
        return (
            "n/a" if self.reason else f"{significant(self.median)} ({significant(self.low)}–{significant(self.high)})"
        )


def ratio(rows: list[ArmResult], scenario: str, arm: str, of: Callable[[ArmResult], float], base: str = BASE) -> Ratio:
    """Return ``of(base's row) / of(arm's row)`` over the repeats; n/a where one computed in another dtype."""
    by = {name: [row for row in rows if (row.scenario, row.arm) == (scenario, name)] for name in (base, arm)}
    for name, several in by.items():
        for row in several:
            if row.wrong_dtype:
                return Ratio(reason=row.wrong_dtype if name == arm else f"{base}: {row.wrong_dtype}")
    values = [of(first) / of(other) for first, other in zip(by[base], by[arm], strict=True)]
    return Ratio(median(values), min(values), max(values))


def seconds_of(row: ArmResult) -> float:
    """Return the seconds of an update."""
    return row.seconds


def memory_of(row: ArmResult) -> float:
    """Return the peak memory, in MiB."""
    return row.memory_mib
