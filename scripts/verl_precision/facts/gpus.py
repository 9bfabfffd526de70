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
    """A GPU, as the torch of this Python reports it."""

    name: str
    capability: tuple[int, int]
    bf16: bool  # whether its hardware computes in bfloat16; otherwise torch emulates that in float32
    kernels: bool  # whether this torch has kernels for it

    def __str__(self) -> str:
        return f"{self.name} (sm{self.capability[0]}{self.capability[1]})"


@cache
def find_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process may use. Another one asks torch, which leaves a CUDA context on each."""
    command = [sys.executable, "-m", "verl_precision.facts.gpus"]
    done = subprocess.run(command, cwd=SCRIPTS, stdout=subprocess.PIPE, text=True, check=True)
    return tuple(Gpu(**each | {"capability": tuple(each["capability"])}) for each in json.loads(done.stdout))


def query_gpus() -> list[Gpu]:
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
    names = re.findall(r"\b(sm|compute)_(\d+)(\d)\b", " ".join(archs))
    built = [(kind, (int(major), int(minor))) for kind, major, minor in names]
    return any(code <= capability and (kind == "compute" or code[0] == capability[0]) for kind, code in built)


if __name__ == "__main__":
    print(json.dumps([asdict(gpu) for gpu in query_gpus()]))
