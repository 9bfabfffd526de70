"""Spawn the ranks of a benchmark, join a process group, and time alternating rounds on all of them."""

import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from verl_precision.bench.interleave import rounds

LEAST_ROUNDS = 41


def spawn(worker: Callable[..., None], ranks: int, *args) -> list:
    """Run ``worker(rank, store, *args, queue)`` in ``ranks`` processes and return the items that rank 0 queued."""
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        torch.multiprocessing.spawn(worker, (f"{folder}/store", *args, queue), nprocs=ranks)
        results = []
        while not queue.empty():
            results += queue.get()
    return results


def join(store: str, rank: int, ranks: int, device: str) -> None:
    """Join the process group that meets in the file ``store``."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "",
        "MASTER_PORT": "",
    }
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)


def decided_by_first(value: bool) -> bool:
    """Return rank 0's ``value``, on every rank."""
    decision = torch.tensor([float(value)], device="cpu")  # through gloo on a GPU too, past its stream
    dist.broadcast(decision, 0)
    return bool(decision.item())


def alternate(
    takes: dict[str, Callable[[], object]],
    prepare: Callable[[str], None],
    seconds: float,
    device: str,
    least_rounds: int = LEAST_ROUNDS,
) -> dict[str, list[float]]:
    """Time all takes in rounds, in a new order each, for ``seconds`` and at least ``least_rounds``.

    Returns:
        the seconds of each take, by round.
    """

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        if dist.get_world_size() > 1:  # NCCL's barrier is a kernel, and would be timed
            dist.barrier()

    times: dict[str, list[float]] = {name: [] for name in takes}
    timed = rounds(takes, wait, prepare)  # in the same orders on every rank
    next(timed)  # untimed: Adam's state is allocated, kernels are loaded
    begin, over = time.monotonic(), False
    while not over:
        for name, taken in next(timed).items():
            times[name].append(taken)
        over = time.monotonic() - begin > seconds and len(times[name]) >= least_rounds
        over = decided_by_first(over)
    return times
