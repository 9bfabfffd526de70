"""Measure time and memory, and name the machine: for bench and bench-amp."""

import gc
import platform
import random
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl_precision.format import slug

PEAK_MEMORY_METHOD = {
    "cpu": "the most bytes of tensors alive at once, from the first weight to the second update; what kernels need "
    "inside is not in it",
    "cuda": "torch.cuda.max_memory_allocated, from the first weight to the second update, above what was there before",
}


def rounds(
    calls: dict[str, Callable[[], object]],
    wait: Callable[[], None],
    prepare: Callable[[str], None] = lambda name: None,
    seed: int = 0,
) -> Iterator[dict[str, float]]:
    """Yield rounds indefinitely. Each times every call once, so that a slow machine slows all of them.

    Args:
        wait: synchronizes with the device; called before and after each call.
        prepare: called with a call's name before it, untimed.
        seed: of the order, a new one each round, since the previous call leaves its data in the caches.

    Yields:
        seconds by name.
    """
    names, shuffle = list(calls), random.Random(seed).shuffle

    def timed(name: str) -> float:
        prepare(name)
        wait()
        begin = time.perf_counter()
        calls[name]()
        wait()
        return time.perf_counter() - begin

    while True:
        shuffle(names)
        yield {name: timed(name) for name in names}


def alternate(
    calls: dict[str, Callable[[], object]],
    seconds: float,
    least_rounds: int,
    device: str,
    prepare: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Time rounds for ``seconds`` and at least ``least_rounds``; return the seconds of each call by round."""
    timed = rounds(calls, torch.cuda.synchronize if device == "cuda" else lambda: None, prepare)
    next(timed)  # untimed: Adam's state is allocated, kernels are loaded
    taken, begin = [], time.monotonic()
    while time.monotonic() - begin <= seconds or len(taken) < least_rounds:
        taken.append(next(timed))
    return {name: [each[name] for each in taken] for name in calls}


class AliveTensors(TorchDispatchMode):
    """Counts the bytes alive at once of the tensors made in its context; what a kernel allocates inside is left out."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.storages:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata)
        return out

    def _gone(self, key: int) -> None:
        self.now -= self.storages.pop(key)


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield what returns the peak bytes of the tensors made in this context; on a GPU its allocator's peak."""
    if device.type == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield lambda: torch.cuda.max_memory_allocated() - before
    else:
        with AliveTensors() as alive:
            yield lambda: alive.peak


def too_large(needed: int, device: str) -> str:
    """Return why ``needed`` bytes do not fit into the free memory, "" where they do."""
    gc.collect()  # modules under FSDP are in reference cycles
    if device == "cuda":
        torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    return "" if needed <= free else f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"


def allocate_workspaces() -> None:
    """Let cuBLAS allocate its workspaces on the GPU, which stay, so that no peak of memory includes them.

    The backward pass has its own: autograd runs it in another thread.
    """
    for dtype in (torch.float32, torch.float16):
        some = torch.ones(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(some, some, some[0]).sum().backward()


def lacks_ampere(format_name: str) -> str:
    """Return why this GPU has no ``format_name``, TF32 or bfloat16, "" where it has: both came with Ampere."""
    if torch.cuda.get_device_capability() >= (8, 0):
        return ""
    return f"{torch.cuda.get_device_name()} has no {format_name}"


def set_tf32(on: bool) -> None:
    """Let CUDA compute products, convolutions and recurrent layers of float32 in TF32, or forbid it, in all threads.

    ``allow_tf32`` sets all three in every torch. Some from 2.9 on warn about it; their ``cudnn.rnn.fp32_precision`` has
    no effect once torch has imported the module of that name, as it does for a GRU on a GPU.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on


def machine(device: str) -> str:
    """Return the name of the GPU, or of the processor and its number of cores."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{models[0].partition(':')[2].strip() if models else platform.machine()}, {len(models)} cores"


def machine_slug(device: str) -> str:
    """Return the machine's part of a result's file name: "cpu", or the slug of the GPU's name."""
    return "cpu" if device == "cpu" else slug(machine(device))
