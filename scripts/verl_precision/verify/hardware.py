"""Describe the device and its host: ``python -m verl_precision.verify.hardware DEVICE FILE`` writes JSON."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from verl_precision.files import write_json

LENGTH = 16384  # terms of a sum: the tokens of a micro-batch, over which a weight's gradient is summed


def gpu() -> dict[str, object]:
    properties, memory = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]  # of all GPUs
    return {
        "name": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "memory": f"{memory[1] / 2**30:.1f} GiB, {memory[0] / 2**30:.1f} free",
        "driver": driver,
        "CUDA of torch": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "cuDNN": torch.backends.cudnn.version(),
        "bf16": "native" if torch.cuda.is_bf16_supported(including_emulation=False) else "emulated or none",
        "fp32 matrix products": torch.get_float32_matmul_precision(),
    }


def fp16_overflow(device: str) -> str:
    """Return the results of a product, a matrix product and a cast that overflow in fp16; IEEE gives inf."""
    large = torch.full((16, 16), 2.0**15, dtype=torch.float16, device=device)
    results = (large * 4, large @ large, (large.float() * 4).half())
    return ", ".join(str(result.flatten()[0].item()) for result in results)


def products(device: str) -> dict[str, str]:
    """Return the error of long 16-bit matrix products, relative to fp64.

    cuBLAS may add parts of a product in 16 bits (torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction, on
    by default): less precise, and inf where the product fits.
    """
    torch.manual_seed(0)
    left, right = (torch.randn(256, LENGTH, device=device) for _ in range(2))
    native = device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    found = {}
    for dtype, short in ((torch.float16, "fp16"), (torch.bfloat16, "bf16"))[: 2 if native else 1]:
        a, b = left.to(dtype), right.to(dtype)
        exact = a.double() @ b.double().T
        for allowed, sums in ((True, "16-bit sums allowed"), (False, "fp32 sums")):
            setattr(torch.backends.cuda.matmul, f"allow_{short}_reduced_precision_reduction", allowed)
            error = ((a @ b.T).double() - exact).norm() / exact.norm()
            found[f"product of {LENGTH} terms, {dtype}, {sums}"] = f"error {error.item():.2e}"
    return found


def main(device: str, file: Path) -> None:
    host = {
        "platform": platform.platform(),
        "CPUs": len(os.sched_getaffinity(0)),
        "host memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "fp16 overflow gives": fp16_overflow(device),
    }
    write_json(file, {"hardware": (gpu() if device == "cuda" else {}) | host | products(device)})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
