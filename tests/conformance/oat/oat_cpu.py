"""Make OAT run without a GPU and under Python 3.11. Import it before oat.

OAT pins launchpad, plasma and a vLLM that have no wheel for this Python, and imports them at the top of its modules.
They are empty modules here; nothing in them is called, except where a case installs a recorder. All that trains is
real: OAT's learner and strategy, DeepSpeed's engines, torch, transformers, gloo.
"""

import sys
from types import ModuleType, SimpleNamespace

import torch
from torch.distributed import distributed_c10d

import recipes.oat_cpu.host  # noqa: F401

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


def rename_argument() -> None:
    """Accept an argument's old name, which OAT uses: it compares torch's versions as strings, so 2.13 is below 2.6."""
    make = distributed_c10d._new_process_group_helper

    def make_group(*args, pg_options=None, **kwargs):
        return make(*args, **{"backend_options": pg_options, **kwargs})

    distributed_c10d._new_process_group_helper = make_group


name_modules()
rename_argument()
torch.cuda.device_count = lambda: 8  # of the node, for OAT's program
