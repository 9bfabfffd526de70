"""What OAT meets on a machine without a GPU: torch, vLLM and DeepSpeed, adapted at import. Import it before oat.

Fits the pins of OAT 0.1.4 to 0.2.4 under Python 3.10: torch 2.6.0, transformers 4.51.3, DeepSpeed 0.16.8, and vLLM
0.8.4 as ``recipes.oat_cpu.vllm_for_cpu`` makes it. launchpad's processes, plasma, vLLM's engine, DeepSpeed's engines
and gloo are real, and OAT's code is untouched.
"""

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["USE_TF"] = "0"  # TensorFlow is there for a library that launchpad loads; transformers would import it all
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

import deepspeed.ops.adam  # noqa: E402
import torch  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402


def take_the_cpu() -> None:
    """Answer what OAT asks of ``torch.cuda`` for the CPU: one device, which is called "cpu".

    ``is_available`` is told too, since DeepSpeed has torch infer it from the number of devices.
    """
    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.set_device = torch.cuda.synchronize = lambda *device: None
    torch.empty = empty_on_the_cpu(torch.empty)


def empty_on_the_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``torch.empty``: OAT's WorkerWrap asks for a weight that it is about to receive on "cuda"."""

    def empty(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return make(*size, device="cpu" if device == "cuda" else device, **kwargs)

    return empty


def train_on_the_cpu() -> None:
    """Let DeepSpeed train in fp16 on any CPU, without what it would compile for minutes at the first use.

    It calls fp16 unsupported on a CPU without fp16 instructions; torch multiplies it there all the same. torch's AdamW
    is the update of its FusedAdam, and gloo does what its own collectives in shared memory do.
    """
    type(get_accelerator()).is_fp16_supported = lambda self: True
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # the attribute of that name is torch
    deepspeed.ops.adam.FusedAdam = torch.optim.AdamW


def name_vllm() -> None:
    """vLLM looks for its platform in its version, which ends in +empty where nothing was compiled with it."""
    version = importlib.metadata.version

    def named(name: str) -> str:
        return version(name).partition("+")[0] + "+cpu" if name == "vllm" else version(name)

    importlib.metadata.version = named


take_the_cpu()
train_on_the_cpu()
name_vllm()
