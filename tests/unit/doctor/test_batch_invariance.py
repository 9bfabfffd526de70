"""Batch-invariant attention, read from vLLM's source, against what its classes return."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_precision.doctor.determinism import batch_invariant_backends, knows_batch_invariance
from verl_precision.facts.packages import package_folder

# What vLLM's classes return, for those that can be imported without a GPU. The classes for ROCm are left out: they
# import vllm._C, which aborts the process on a CPU for which vLLM has loaded its AVX2 or AVX512 library.
VLLM = """
import json
from vllm.v1.attention.backends.registry import AttentionBackendEnum

invariant = {}
for backend in AttentionBackendEnum:
    if backend.name.startswith("ROCM_"):
        continue
    try:
        invariant[backend.name] = backend.get_class().supports_batch_invariance()
    except (AssertionError, ImportError, ValueError):
        pass
print(json.dumps(invariant))
"""


@pytest.mark.subprocess
def test_backends_are_those_that_vllms_classes_declare(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", VLLM], capture_output=True, text=True, cwd=tmp_path, check=True)
    invariant = json.loads(done.stdout.splitlines()[-1])
    assert invariant["FLASH_ATTN"] and invariant["TRITON_ATTN_DIFFKV"] and not invariant["CPU_ATTN"]
    names = batch_invariant_backends(package_folder("vllm"))
    assert {name: name in names for name in invariant} == invariant
    assert knows_batch_invariance(package_folder("vllm")) and not knows_batch_invariance(tmp_path)
