"""Run a benchmark on several ranks, and time alternating rounds on all of them."""

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from verl_precision.bench.gpu_formats import set_tf32
from verl_precision.bench.interleave import rounds
from verl_precision.bench.regime_timing import RegimeTiming, one_line
from verl_precision.bench.resource_usage import allocate_workspaces

LEAST_ROUNDS = 41


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
    for same_configuration in measure(*args, device):
        timings += same_configuration
        if rank == 0:
            print(one_line(same_configuration), flush=True)
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
