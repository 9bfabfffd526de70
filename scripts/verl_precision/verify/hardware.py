"""Describe the device and its host: ``python -m verl_precision.verify.hardware DEVICE FILE`` writes JSON."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from verl_precision.files import write_json


def gpu() -> dict[str, Any]:
    """Return what torch and the driver report of the current GPU; memory in GiB."""
    properties, memory = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]  # of all GPUs
    return {
        "name": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "memory": f"{memory[1] / 2**30:.1f} GiB, {memory[0] / 2**30:.1f} free",
        "multiprocessors": properties.multi_processor_count,
        "driver": driver,
        "CUDA of torch": torch.version.cuda,
        "architectures of torch": " ".join(torch.cuda.get_arch_list()),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "cuDNN": torch.backends.cudnn.version(),
        "bf16": "native" if torch.cuda.is_bf16_supported(including_emulation=False) else "emulated or none",
        "fp32 matrix products": torch.get_float32_matmul_precision(),
    }


def fp16_overflow(device: str) -> list[str]:
    """Return the results of fp16 operations that overflow: a product, a matrix product, a cast; IEEE gives inf."""
    large = torch.full((16, 16), 2.0**15, dtype=torch.float16, device=device)
    return [str(result.flatten()[0].item()) for result in (large * 4, large @ large, (large.float() * 4).half())]


def products(device: str) -> dict[str, str]:
    """Return the error of long 16-bit matrix products, relative to fp64, and whether sums may be rounded to 16 bits.

    cuBLAS may add parts of a product in 16 bits (torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction, on
    by default): less precise, and inf where the product fits. The inner length is that of a weight's gradient: the
    tokens of a micro-batch.
    """
    torch.manual_seed(0)
    left, right = (torch.randn(256, 16384, device=device) for _ in range(2))
    native = device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    flags = {
        torch.float16: "allow_fp16_reduced_precision_reduction",
        torch.bfloat16: "allow_bf16_reduced_precision_reduction",
    }
    found = {}
    for dtype, flag in list(flags.items())[: 2 if native else 1]:
        a, b = left.to(dtype), right.to(dtype)
        exact = a.double() @ b.double().T
        for allowed in (True, False):
            setattr(torch.backends.cuda.matmul, flag, allowed)
            error = ((a @ b.T).double() - exact).norm() / exact.norm()
            sums = "16-bit sums allowed" if allowed else "fp32 sums"
            found[f"product of 16384 terms, {dtype}, {sums}"] = f"error {error.item():.2e}"
    return found


def main(device: str, file: Path) -> None:
    host = {
        "platform": platform.platform(),
        "CPUs": len(os.sched_getaffinity(0)),
        "host memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "disk": f"{shutil.disk_usage(file.parent).free / 2**30:.0f} GiB free",
    }
    found = (gpu() if device == "cuda" else {}) | host | {"fp16 overflow gives": ", ".join(fp16_overflow(device))}
    # vLLM's and torch.compile's kernels are compiled at run time, with Triton.
    header = Path(sysconfig.get_path("include"), "Python.h")
    found |= {"C compiler": bool(shutil.which("cc")), "Python.h": header.exists()}
    found |= {"/dev/shm": f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free"} | products(device)
    write_json(file, {"hardware": found})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
