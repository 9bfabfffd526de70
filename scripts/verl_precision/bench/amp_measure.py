"""Measure the arms of a scenario, which take turns at every update, from the same weights and on the same data."""

import itertools
import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Optional

import torch

from verl_precision.bench.amp_scenarios import SCENARIOS, TF32, Arm, BuiltArm, arms_on
from verl_precision.bench.measurement import peak_memory, rounds, set_tf32

LAST = 5  # updates over which the final loss is a mean


@dataclass(frozen=True)
class ArmResult:
    """The measurements of one arm of a scenario in one repeat: a row of the CSV."""

    scenario: str
    arm: str
    seed: int
    requested_dtype: str
    effective_dtype: Optional[str]
    effective_share: Optional[float]  # of effective_dtype in the multiplications of the first forward
    fallback: Optional[str]
    optimizer_steps: int  # warm-up included
    overflow_steps: int
    seconds: float  # of an update, the median
    throughput: float  # in the scenario's unit per second
    memory_mib: float
    first: float  # loss or return of the first update
    last: float  # mean over the last LAST updates


def measure(name: str, size: str, seed: int, device: torch.device) -> list[ArmResult]:
    """Measure all arms of a scenario, in one repeat; ``size`` is "small", "cpu" or "cuda"."""
    scenario, arms = SCENARIOS[name], arms_on(device)
    shape = dict(scenario.sizes[size])
    updates = shape.pop("updates")
    built: dict[str, BuiltArm] = {}
    peaks: dict[str, int] = {}
    outcomes: dict[str, list[Any]] = {arm: [] for arm in arms}

    def take(arm: str) -> None:
        if TF32 in arms:
            set_tf32(arm == TF32)
        outcomes[arm].append(built[arm].update())

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for arm, dtype in arms.items():
        torch.manual_seed(seed)
        with peak_memory(device) as peak:
            built[arm] = scenario.build(Arm(dtype, seed, device), **shape)
            take(arm)  # observes the dtype, creates Adam's state, loads kernels
            take(arm)
            peaks[arm] = peak()
    takes = {arm: lambda arm=arm: take(arm) for arm in arms}
    times = list(itertools.islice(rounds(takes, wait, seed=seed), updates))
    results = []
    for arm, of in built.items():
        stats = of.trainer.get_stats()
        values = [math.nan if value is None else float(value) for value in outcomes[arm]]
        seconds = median(taken[arm] for taken in times)
        result = ArmResult(
            scenario=name,
            arm=arm,
            seed=seed,
            requested_dtype=arms[arm],
            effective_dtype=stats["effective_dtype"],
            effective_share=next(iter(stats["effective_dtype_share"].values()), None),
            fallback=stats["fallback"],
            optimizer_steps=stats["training_steps"],
            overflow_steps=stats["overflow_steps"],
            seconds=seconds,
            throughput=of.items / seconds,
            memory_mib=peaks[arm] / 2**20,
            first=values[0],
            last=fmean(values[-min(LAST, updates) :]),
        )
        results.append(result)
    return results
