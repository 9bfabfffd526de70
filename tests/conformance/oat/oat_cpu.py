"""Make OAT run without a GPU and under Python 3.11. Import it before oat.

OAT pins launchpad, plasma and a vLLM that have no wheel for this Python, and imports them at the top of its modules.
They are empty modules here; nothing in them is called, except where a case installs a recorder. All that trains is
real: OAT's learner and strategy, DeepSpeed's engines, torch, transformers, gloo.
"""

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed.ops.adam
import torch
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

NAMES = {
    "vllm": {"SamplingParams": None, "__version__": "0.8.4"},
    "vllm.lora": {},
    "vllm.lora.request": {"LoRARequest": None},
    "vllm.outputs": {"RequestOutput": None},
    "launchpad": {},
    "launchpad.nodes": {},
    "launchpad.nodes.python": {"local_multi_processing": SimpleNamespace()},
    "pyarrow.plasma": {},
}


def name_modules() -> None:
    """Put the modules that are imported and not called into ``sys.modules``."""
    for name, contents in NAMES.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)


def take_the_cpu() -> None:
    """Answer OAT's queries of ``torch.cuda`` for the CPU. DeepSpeed queries its accelerator, which is the CPU here.

    DeepSpeed reports fp16 as unsupported on a CPU without fp16 instructions; torch emulates it. The extensions that
    DeepSpeed would compile at first use, which takes two minutes, are replaced: FusedAdam by torch's AdamW, which
    computes the same update, and the shared-memory collectives by gloo's.
    """
    type(get_accelerator()).is_fp16_supported = lambda self: True
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # as an attribute it is torch itself
    deepspeed.ops.adam.FusedAdam = torch.optim.AdamW
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.set_device = torch.cuda.synchronize = lambda *device: None
    torch.cuda.device_count = lambda: 8


def know_torch() -> None:
    """Accept an argument's old name, which OAT uses: it compares torch's versions as strings, so 2.13 is below 2.6."""
    make = distributed_c10d._new_process_group_helper

    def make_group(*args, pg_options=None, **kwargs):
        return make(*args, **{"backend_options": pg_options, **kwargs})

    distributed_c10d._new_process_group_helper = make_group


class CudaIsTheCpu(TorchFunctionMode):
    """Create tensors requested on "cuda", as by WorkerWrap, on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return function(*args, **({**kwargs, "device": "cpu"} if kwargs.get("device") == "cuda" else kwargs))


name_modules()
take_the_cpu()
know_torch()
