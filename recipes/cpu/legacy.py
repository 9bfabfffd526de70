"""verl 0.4.1 to 0.8.0 without a GPU: these releases have no platforms, so what they ask a device for is adapted.

Import it before verl. Under Ray, ``RAY_RUNTIME_ENV_HOOK=recipes.cpu.legacy.in_every_process`` does so in the driver and
in every process that Ray starts.
"""

from types import ModuleType
from typing import Any

import torch

from recipes.cpu import host


def in_every_process(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """The hook of ``ray.init``: takes the environment of its processes and has them import this module."""
    return {**(runtime_env or {}), "worker_process_setup_hook": "recipes.cpu.legacy.loaded"}


def loaded() -> None:
    """Nothing: to call it is to have imported this module."""


def take_the_cpu(device: ModuleType) -> None:
    """verl finds the CPU by itself where there is no GPU, and names nccl, or nothing, for its collectives."""
    host.replace(device, "get_nccl_backend", lambda _: lambda: "gloo")


def find_engines(base: ModuleType) -> None:
    """The FSDP engines are registered for "cuda" and run on any device."""
    host.replace(base, "get_device_name", lambda _: lambda: "cuda")


torch.cpu.current_device = lambda: host.Cpu("cpu")
host.adapt()
host.when_imported("verl.utils.device", take_the_cpu)
host.when_imported("verl.workers.engine.base", find_engines)
