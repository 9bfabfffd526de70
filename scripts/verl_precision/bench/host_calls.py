"""Count what the host asks of the device in a call: operators, kernel launches, synchronisations, values read."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

LAUNCH = re.compile(r"cu(da)?Launch\w*Kernel|cu(da)?GraphLaunch")
SYNCHRONIZATION = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize")
HOST_READ = "aten::_local_scalar_dense"  # .item(), float(), bool() of a tensor


@dataclass(frozen=True)
class HostCalls:
    """What the host asks of the device in one call.

    Args:
        operators: torch operators that no other operator called.
        host_reads: values that the host reads from a tensor (``aten::_local_scalar_dense``).
        launches, synchronizations: calls of CUDA's API; ``None`` without CUDA, or where the profiler may not
            see them.
        host_copies: copies from the device to the host.
    """

    operators: int
    host_reads: int
    launches: int | None
    synchronizations: int | None
    host_copies: int | None


def kind_of(event) -> str:
    """Return the field of :class:`HostCalls` in which an event of the profiler counts, "" where in none."""
    if event.device_type == DeviceType.CUDA:
        return "host_copies" if event.name.startswith("Memcpy DtoH") else ""
    if LAUNCH.match(event.name):
        return "launches"
    if SYNCHRONIZATION.match(event.name):
        return "synchronizations"
    if event.name == HOST_READ:
        return "host_reads"
    inner = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
    return "operators" if event.name.startswith("aten::") and not inner else ""


def profiled(call: Callable[[], object], device: str) -> Counter[str]:
    """Return the number of events of each kind while ``call`` runs and the profiler then waits for the device."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as recorded:
        call()
    return Counter(map(kind_of, recorded.events()))


def host_calls(call: Callable[[], object], device: str, prepare: Callable[[], None] = lambda: None) -> HostCalls:
    """Count what one ``call`` asks of the device, after another that is not counted.

    The profiler itself synchronizes with the device: what it records around nothing is subtracted.

    Args:
        device: "cpu" or "cuda".
        prepare: called before each of the two, not counted.
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
    return HostCalls(
        operators=counted["operators"],
        host_reads=counted["host_reads"],
        launches=counted["launches"] if on_gpu else None,
        synchronizations=counted["synchronizations"] if on_gpu else None,
        host_copies=counted["host_copies"] if on_gpu else None,
    )
