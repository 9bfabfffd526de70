"""Query the NVIDIA GPUs of this machine: ``python -m verl_precision.facts.gpus`` prints them as JSON."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache

from verl_precision.paths import SCRIPTS


@dataclass(frozen=True)
class Gpu:
    """A GPU, as the torch of this Python reports it.

    Args:
        name: such as "Tesla T4".
        capability: compute capability, such as (7, 5).
        bf16: whether its hardware computes in bfloat16; otherwise torch emulates that in float32.
        kernels: whether this torch has kernels for it.
    """

    name: str
    capability: tuple[int, int]
    bf16: bool
    kernels: bool

    def __str__(self) -> str:
        return f"{self.name} (sm{self.capability[0]}{self.capability[1]})"


@cache
def find_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process may use. Another process asks torch.

    Selecting a GPU leaves a CUDA context on it until the process ends, and that of ``make run`` lives as long as a run.
    """
    command = [sys.executable, "-m", "verl_precision.facts.gpus"]
    done = subprocess.run(command, cwd=SCRIPTS, stdout=subprocess.PIPE, text=True, check=True)
    return tuple(Gpu(**each | {"capability": tuple(each["capability"])}) for each in json.loads(done.stdout))


def query_gpus() -> list[Gpu]:
    """Return the GPUs that torch shows to this process."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            native = torch.cuda.is_bf16_supported(including_emulation=False)  # by default emulation counts
        capability = torch.cuda.get_device_capability(index)
        kernels = has_kernels(capability, torch.cuda.get_arch_list())
        gpus.append(Gpu(torch.cuda.get_device_name(index), capability, native, kernels))
    return gpus


def has_kernels(capability: tuple[int, int], archs: Iterable[str]) -> bool:
    """Return whether code that was compiled for ``archs``, such as ``sm_75``, runs on a GPU of this capability.

    ``sm_XY`` runs on GPUs of the same major version from X.Y on, ``compute_XY`` on all from X.Y on. Names that end in
    a letter, such as ``sm_90a``, are a subset for one GPU and come besides the plain one.
    """
    for kind, major, minor in re.findall(r"\b(sm|compute)_(\d+)(\d)\b", " ".join(archs)):
        built = (int(major), int(minor))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


if __name__ == "__main__":
    print(json.dumps([asdict(gpu) for gpu in query_gpus()]))
