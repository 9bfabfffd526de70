"""Adapt torch, vLLM and DeepSpeed so that OAT runs on a machine without a GPU. Import it before oat.

For the pins of OAT 0.1.4 to 0.2.4 under Python 3.10: torch 2.6.0, transformers 4.51.3, DeepSpeed 0.16.8, and vLLM
0.8.4 as built by ``recipes.oat_cpu.vllm_for_cpu``. launchpad's processes, plasma, vLLM's engine, DeepSpeed's engines
and gloo are real, and OAT's code is unchanged.
"""

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["USE_TF"] = "0"  # TensorFlow is installed for launchpad; transformers would import it
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

import deepspeed.ops.adam  # noqa: E402
import torch  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402


def present_cpu_as_cuda() -> None:
    """Make ``torch.cuda`` report one device, named "cpu", for OAT.

    ``is_available`` stays false, since torch would infer it from the number of devices under DeepSpeed.
    """
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.set_device = torch.cuda.synchronize = lambda *device: None
    torch.empty = empty_on_cpu(torch.empty)


def empty_on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``torch.empty`` to allocate "cuda" tensors on the CPU, as OAT's WorkerWrap does for received weights."""

    def empty(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return make(*size, device="cpu" if device == "cuda" else device, **kwargs)

    return empty


def allow_fp16_training() -> None:
    """Let DeepSpeed train in fp16 on any CPU, without extensions that it would compile for minutes.

    DeepSpeed reports fp16 as unsupported on a CPU without fp16 instructions, where torch supports it. torch's AdamW
    has the same update as FusedAdam, and gloo replaces DeepSpeed's shared-memory collectives.
    """
    type(get_accelerator()).is_fp16_supported = lambda self: True
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: (
        None
    )  # deepspeed.comm.torch, as an attribute, is torch
    deepspeed.ops.adam.FusedAdam = torch.optim.AdamW


def set_vllm_version() -> None:
    """Make vLLM's version end in +cpu, from which vLLM infers its platform; a build without kernels has +empty."""
    version = importlib.metadata.version

    def named(name: str) -> str:
        return version(name).partition("+")[0] + "+cpu" if name == "vllm" else version(name)

    importlib.metadata.version = named


present_cpu_as_cuda()
allow_fp16_training()
set_vllm_version()
