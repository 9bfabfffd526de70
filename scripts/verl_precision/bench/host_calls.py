"""Count what the host asks of the device in a call: kernel launches, synchronizations, values read."""

import re
from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

# By column of the report: the names of the profiler's events that count there.
EVENTS = {
    "launches": re.compile(r"cu(da)?Launch\w*Kernel|cu(da)?GraphLaunch"),
    "synchronizations": re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize"),
    "host_reads": re.compile("aten::_local_scalar_dense"),  # .item(), float(), bool() of a tensor
}


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
        device: "cpu" or "cuda".
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
