"""Install vLLM 0.8.4 for the CPU from its source: ``python -m recipes.oat_cpu.vllm_for_cpu vllm-0.8.4.tar.gz``.

vLLM's own build requires torch's CMake files, and those of the torch in OAT's pins require nvcc. So the Python code is
installed for the device "empty", and the eight C++ files for CPUs without AVX-512 are compiled by torch's extension
builder, in about five minutes; without NUMA, whose header few machines have.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path

from torch.utils.cpp_extension import load

SOURCES = ("activation", "attention", "cache", "utils", "layernorm", "mla_decode", "pos_encoding", "torch_bindings")
FLAGS = ("-O2", "-fopenmp", "-mavx2", "-mf16c", "-mfma", "-DVLLM_CPU_EXTENSION", "-DVLLM_NUMA_DISABLED")


def install(source: Path) -> None:
    """Install the package from ``source``, vLLM's sdist, and ``_C`` beside its Python."""
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", str(source)]
    subprocess.run(pip, env=os.environ | {"VLLM_TARGET_DEVICE": "empty"}, check=True)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
        (csrc,) = Path(folder).glob("vllm-*/csrc")
        cache = csrc / "cpu/cache.cpp"  # on x86 it dispatches fp8 but, in this release, not fp16
        cache.write_text(
            cache.read_text().replace("VLLM_DISPATCH_FLOATING_TYPES_WITH_E5M2", "VLLM_DISPATCH_FLOATING_TYPES")
        )
        load(
            name="_C",
            sources=[str(csrc / "cpu" / f"{name}.cpp") for name in SOURCES],
            extra_include_paths=[str(csrc)],
            extra_cflags=[*FLAGS, "-DPy_LIMITED_API=0x03080000"],
            extra_ldflags=["-fopenmp"],
            build_directory=folder,
            is_python_module=False,
        )
        package = Path(find_spec("vllm").submodule_search_locations[0])
        (package / "_C.abi3.so").write_bytes(Path(folder, "_C.so").read_bytes())


if __name__ == "__main__":
    install(Path(sys.argv[1]))
