"""Time the regimes of one configuration in turns, on one or several ranks, and count what the host asks of the GPU."""

import os
import pickle
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from verl_precision.bench.measurement import allocate_workspaces, rounds, set_tf32

BASE = "bf16"
LEAST_ROUNDS = 41
# By column of the report: the names of the profiler's events that count there.
EVENTS = {
    "launches": re.compile(r"cu(da)?Launch\w*Kernel|cu(da)?GraphLaunch"),
    "synchronizations": re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize"),
    "host_reads": re.compile("aten::_local_scalar_dense"),  # .item(), float(), bool() of a tensor
}


@dataclass(frozen=True)
class RegimeTiming:
    """The cost of one regime in one configuration; a row of the CSV."""

    part: str  # "optimizer step" or "training step"
    subject: str  # the optimizer, or the model and its number of layers
    parameters_m: float  # millions
    regime: str  # "all" where the configuration was left out
    ranks: int = 1
    tokens: int | None = None  # of a training step
    seconds: float | None = None  # median over the rounds
    ratio: float | None = None  # median of the ratio to bf16 in the same round, None where bf16 was left out
    rounds: int = 0
    peak_gib: float | None = None  # above the weights, of a training step
    launches: int | None = None  # this and the next two: of one call, see host_calls
    synchronizations: int | None = None
    host_reads: int | None = None
    left_out: str = ""  # why there is no measurement

    @property
    def name(self) -> str:
        """The name of the configuration, which its regimes share."""
        return f"{self.part}, {self.subject}, {self.parameters_m:g} M, {self.ranks} rank(s)"


def timings_of(
    times: dict[str, list[float]],
    counts: dict[str, dict[str, int | None]],
    peaks: dict[str, float] | None = None,
    **configuration,
) -> list[RegimeTiming]:
    """Summarize the seconds of each regime by round.

    Args:
        counts: what the host asks of the device in one call, by regime.
        peaks: peak memory above the weights in GiB, by regime.
    """
    base = times.get(BASE, [])
    ratios = {name: [t / b for t, b in zip(times[name], base, strict=True)] for name in times if base}
    return [
        RegimeTiming(
            **configuration,
            **counts[name],
            regime=name,
            seconds=statistics.median(times[name]),
            ratio=statistics.median(ratios[name]) if base else None,
            rounds=len(times[name]),
            peak_gib=peaks and peaks[name],
        )
        for name in times
    ]


def spawn(
    measure: Callable[..., Iterator[list[RegimeTiming]]], ranks: int, device: str, *args: object
) -> list[RegimeTiming]:
    """Run ``measure(*args, device)`` in ``ranks`` processes that form a group, and return what rank 0 measures."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (Path(folder), measure, ranks, device, args), nprocs=ranks)
        return pickle.loads(Path(folder, "timings").read_bytes())


def run_rank(rank: int, folder: Path, measure: Callable, ranks: int, device: str, args: tuple) -> None:
    """Join the process group, measure, and let rank 0 print the timings and write them into ``folder``."""
    names = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MASTER_ADDR": "", "MASTER_PORT": ""}
    os.environ |= names
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    if device == "cuda":
        torch.cuda.set_device(rank)
        set_tf32(False)
        allocate_workspaces()
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    timings = []
    for same in measure(*args, device):
        timings += same
        if rank == 0:
            results = [f"{row.regime} {row.left_out or f'{row.seconds * 1e3:.1f} ms'}" for row in same]
            print(f"{same[0].name}: {', '.join(results)}", flush=True)
    if rank == 0:
        (folder / "timings").write_bytes(pickle.dumps(timings))
    dist.destroy_process_group()


def decided_by_first(value: bool) -> bool:
    """Return rank 0's ``value``, on every rank."""
    decision = torch.tensor([float(value)], device="cpu")  # through gloo on a GPU too, past its stream
    dist.broadcast(decision, 0)
    return bool(decision.item())


def alternate(
    calls: dict[str, Callable[[], object]],
    prepare: Callable[[str], None],
    seconds: float,
    device: str,
    least_rounds: int = LEAST_ROUNDS,
) -> dict[str, list[float]]:
    """Time all calls in rounds, in a new order each, for ``seconds`` and at least ``least_rounds``.

    Returns:
        the seconds of each call, by round.
    """

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        if dist.get_world_size() > 1:  # NCCL's barrier is a kernel, and would be timed
            dist.barrier()

    times: dict[str, list[float]] = {name: [] for name in calls}
    timed = rounds(calls, wait, prepare)  # in the same orders on every rank
    next(timed)  # untimed: Adam's state is allocated, kernels are loaded
    begin, over = time.monotonic(), False
    while not over:
        for name, took in next(timed).items():
            times[name].append(took)
        over = time.monotonic() - begin > seconds and len(times[name]) >= least_rounds
        over = decided_by_first(over)
    return times


def profiled(call: Callable[[], object], device: str) -> Counter[str]:
    """Return the number of events by column while ``call`` runs and the profiler then waits for the device."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as recorded:
        call()
    names = [event.name for event in recorded.events()]
    return Counter(column for name in names for column, pattern in EVENTS.items() if pattern.match(name))


def host_calls(
    call: Callable[[], object], device: str, prepare: Callable[[], None] = lambda: None
) -> dict[str, int | None]:
    """Count what one ``call`` asks of the device, after another that is not counted.

    The profiler itself synchronizes with the device: what it records around nothing is subtracted.

    Args:
        prepare: called before each of the two, not counted.

    Returns:
        the counts by column; None for launches and synchronizations without CUDA, or where the profiler may not see
        them.
    """
    prepare()
    call()  # loads kernels, allocates workspaces
    profiled(lambda: None, device)  # initializes CUPTI
    around = profiled(lambda: None, device)
    prepare()
    if device == "cuda":
        torch.cuda.synchronize()
    counted = profiled(call, device)
    counted.subtract(around)
    on_gpu = counted["launches"] > 0  # every call launches kernels; 0 where CUPTI lacks the permission
    return {column: counted[column] if on_gpu or column == "host_reads" else None for column in EVENTS}
