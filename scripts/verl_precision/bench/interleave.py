"""Time alternatives in interleaved rounds, and name the machine and its files."""

import platform
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from verl_precision.format import slug


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
        seconds by name, in the order of the calls.
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


def machine(device: str) -> str:
    """Return the name of the GPU, or of the processor and its number of cores."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{models[0].partition(':')[2].strip() if models else platform.machine()}, {len(models)} cores"


def machine_slug(device: str) -> str:
    """Return the machine's part of a result's file name: "cpu", or the slug of the GPU's name."""
    return "cpu" if device == "cpu" else slug(machine(device))
