"""verl 0.4.1 to 0.8.0 without a GPU: these releases have no platforms, so what they ask a device for is adapted.

Import it before verl. Under Ray, ``RAY_RUNTIME_ENV_HOOK=recipes.cpu.legacy.in_every_process`` does so in the driver and
in every process that Ray starts.
"""

import os
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
    if hasattr(device, "get_resource_name"):  # from 0.7.1 on
        host.replace(device, "get_resource_name", lambda _: lambda: "GPU")


def find_engines(base: ModuleType) -> None:
    """The FSDP engines are registered for "cuda" and run on any device."""
    host.replace(base, "get_device_name", lambda _: lambda: "cuda")


def unpad_without_flash(attention: ModuleType) -> None:
    """verl packs sequences by functions of flash attention; it has the same in torch alone, for another device."""

    def functions():
        from verl.utils.npu_flash_attn_utils import index_first_axis, pad_input, rearrange, unpad_input

        return index_first_axis, pad_input, rearrange, unpad_input

    host.replace(attention, "_get_attention_functions", lambda _: functions)


def name_fused_moe(layer: ModuleType) -> None:
    """verl 0.7.1 and 0.8.0 look for layers of this class, whose name vLLM 0.28 no longer has."""
    layer.FusedMoE = layer.RoutedExperts


def name_device(cpu: ModuleType) -> None:
    """Trainer and server meet at a socket that is named after the device; Ray gives both the same."""
    cpu.CpuPlatform.get_device_uuid = classmethod(lambda cls, index: f"cpu-{os.environ['CUDA_VISIBLE_DEVICES']}")


torch.cpu.ipc_collect = lambda: None
torch.cpu.current_device = lambda: host.Cpu("cpu")
host.adapt()
host.when_imported("verl.utils.device", take_the_cpu)
host.when_imported("verl.workers.engine.base", find_engines)
host.when_imported("vllm.model_executor.layers.fused_moe.layer", name_fused_moe)
host.when_imported("vllm.platforms.cpu", name_device)
host.when_imported("verl.utils.attention_utils", unpad_without_flash)
