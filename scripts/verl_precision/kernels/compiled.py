"""Compile a recorded kernel for a generation of GPUs, and measure the result."""

import re
import subprocess
import tempfile
from dataclasses import dataclass

import triton
from triton import knobs

from verl_precision.kernels.generations import Generation
from verl_precision.kernels.launches import Launch, target

# Instructions of PTX that multiply matrices in tensor cores: up to Ampere and Ada, of Hopper, of Blackwell.
TENSOR_CORES = re.compile(r"^\s*(?:@\S+\s+)?(wmma\.mma|mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", re.M)
TENSOR_MEMORY = 512  # columns of a multiprocessor of Blackwell


@dataclass(frozen=True)
class Compiled:
    """A kernel as it would run on a GPU."""

    error: str = ""  # why it does not compile; the rest is then empty
    shared: int = 0  # bytes of shared memory of a thread block
    registers: int = 0  # of a thread
    spilled: int = 0  # bytes of a thread's local memory
    tensor_cores: int = 0  # instructions in its PTX that use them
    dots: int = 0  # multiplications of matrices in its Triton code

    def fits(self, generation: Generation) -> bool:
        return not self.error and self.shared <= generation.shared


def compile_launch(launch: Launch, generation: Generation) -> Compiled:
    """Compile with Triton and its ptxas; a compiled kernel is in Triton's cache and is not compiled again."""
    try:
        kernel = triton.compile(launch.source, target=target(generation), options=launch.options.__dict__)
    except OSError:  # of this machine: a full disk, a tool that is missing
        raise
    except Exception as error:  # of many kinds: of Triton's passes, of LLVM and of ptxas
        return Compiled(error=first_cause(error))
    if (columns := getattr(kernel.metadata, "tmem_size", None) or 0) > TENSOR_MEMORY:  # Triton's launcher refuses it
        return Compiled(error=f"{columns} columns of {TENSOR_MEMORY} of tensor memory")
    registers, spilled = resources(kernel.asm["cubin"])
    found = len(TENSOR_CORES.findall(kernel.asm["ptx"])), len(re.findall(r"\btt\.dot\b", kernel.asm["ttir"]))
    return Compiled("", kernel.metadata.shared, registers, spilled, *found)


def resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread and the bytes of its local memory, which hold what does not fit into them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", printed)[1]), int(re.search(r"STACK:(\d+)", printed)[1])


def first_cause(error: BaseException) -> str:
    """Return one line: of a chain of exceptions the first, which names the defect."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "error" in line.lower()]
    return f"{type(error).__name__}: {(told or lines or ['no message'])[0]}"[:300]
