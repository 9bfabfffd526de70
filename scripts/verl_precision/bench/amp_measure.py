"""Measure the arms of a scenario, which take turns at every update, from the same weights and on the same data."""

import hashlib
import itertools
import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Optional

import torch

from verl_precision.bench.amp_scenarios import BASE, SCENARIOS, TF32, Arm, BuiltArm, arms_on
from verl_precision.bench.gpu_formats import set_tf32
from verl_precision.bench.interleave import rounds
from verl_precision.bench.resource_usage import gpu_busy, peak_memory
from verl_precision.format import significant

LAST = 5  # updates over which the final loss is a mean
MIB = 2**20


@dataclass(frozen=True)
class ArmResult:
    """The measurements of one arm of a scenario in one repeat: a row of the CSV."""

    scenario: str
    arm: str
    repeat: int
    seed: int
    order: str  # the arm's place in each timed round, from 0
    weights: str  # digest of the initial ones
    max_grad_norm: float
    requested_dtype: str
    effective_dtype: Optional[str]
    effective_share: Optional[float]  # of effective_dtype in the multiplications of the first forward
    fallback: Optional[str]
    optimizer_steps: int  # warm-up included
    overflow_steps: int
    updates: int  # timed ones
    seconds: float  # of an update, the median
    throughput: float  # in unit per second
    unit: str
    memory_mib: float
    gpu_busy: Optional[float]  # share of an update in which the GPU computes
    outcome: str  # loss or return
    first: float  # of the first update
    last: float  # mean over the last LAST updates

    @property
    def wrong_dtype(self) -> str:
        """Return why the arm did not compute in its dtype; "" where it did."""
        if self.fallback:
            return self.fallback
        if self.effective_dtype != self.requested_dtype:
            return f"it ran in {self.effective_dtype}, not in {self.requested_dtype}"
        return ""


def measure(name: str, size: str, repeat: int, seed: int, device: torch.device, on_cpu: bool = True) -> list[ArmResult]:
    """Measure all arms of a scenario, in one repeat; ``size`` is "small", "cpu" or "cuda"."""
    scenario = SCENARIOS[name]
    shape = dict(scenario.sizes[size])
    updates = shape.pop("updates")
    runs: dict[str, BuiltArm] = {}
    peaks: dict[str, int] = {}
    weights: dict[str, str] = {}
    arms = arms_on(device)
    outcomes: dict[str, list[Any]] = {arm: [] for arm in arms}

    def take(arm: str) -> None:
        if TF32 in arms:
            set_tf32(arm == TF32)
        outcomes[arm].append(runs[arm].update())

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for arm, dtype in arms.items():
        torch.manual_seed(seed)
        with peak_memory(device) as peak:
            runs[arm] = scenario.build(Arm(dtype, seed, device, on_cpu), **shape)
            weights[arm] = digest(runs[arm].trainer.module)
            take(arm)  # observes the dtype, creates Adam's state, loads kernels
            take(arm)
            peaks[arm] = peak()
    takes = {arm: lambda arm=arm: take(arm) for arm in arms}
    times = list(itertools.islice(rounds(takes, wait, seed=seed), updates))
    results = []
    for arm, run in runs.items():
        stats = run.trainer.get_stats()
        values = [math.nan if value is None else float(value) for value in outcomes[arm]]
        seconds = median(taken[arm] for taken in times)
        result = ArmResult(
            scenario=name,
            arm=arm,
            repeat=repeat,
            seed=seed,
            order=" ".join(str(list(taken).index(arm)) for taken in times),
            weights=weights[arm],
            max_grad_norm=run.trainer.config.max_grad_norm,
            requested_dtype=arms[arm],
            effective_dtype=stats["effective_dtype"],
            effective_share=next(iter(stats["effective_dtype_share"].values()), None),
            fallback=stats["fallback"],
            optimizer_steps=stats["training_steps"],
            overflow_steps=stats["overflow_steps"],
            updates=updates,
            seconds=seconds,
            throughput=run.items / seconds,
            unit=scenario.unit,
            memory_mib=peaks[arm] / MIB,
            gpu_busy=gpu_busy(takes[arm]) if device.type == "cuda" else None,
            outcome=scenario.outcome,
            first=values[0],
            last=fmean(values[-min(LAST, updates) :]),
        )
        results.append(result)
    return results


def digest(module: torch.nn.Module) -> str:
    """Return 12 hexadecimal digits of the weights' SHA-256."""
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()[:12]


@dataclass(frozen=True)
class Ratio:
    """The base's value over an arm's in the same repeat: the median over the repeats and the range, or why not."""

    median: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str = ""

    @property
    def saving(self) -> str:
        """Return how much less the arm needs, in percent."""
        return "n/a" if self.reason else f"{1 - 1 / self.median:.0%}"

    def __str__(self) -> str:
        if self.reason:
            return "n/a"
        return f"{significant(self.median)} ({significant(self.low)}–{significant(self.high)})"


def ratio(rows: list[ArmResult], scenario: str, arm: str, field: str, base: str = BASE) -> Ratio:
    """Return the base's ``field`` over the arm's, over the repeats; n/a where one computed in another dtype."""
    by = {name: [row for row in rows if (row.scenario, row.arm) == (scenario, name)] for name in (base, arm)}
    for name, several in by.items():
        for row in several:
            if row.wrong_dtype:
                return Ratio(reason=row.wrong_dtype if name == arm else f"{base}: {row.wrong_dtype}")
    values = [getattr(first, field) / getattr(other, field) for first, other in zip(by[base], by[arm], strict=True)]
    return Ratio(median(values), min(values), max(values))
