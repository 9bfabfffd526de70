"""Kernels that are compiled for other GPUs, and their arithmetic in Triton's interpreter, on unpatched releases."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from support.waiting import TIMEOUT_S, wait_until

from verl_precision.commands import check_kernels
from verl_precision.errors import Refused
from verl_precision.kernels.generations import DEFAULT, GENERATIONS
from verl_precision.kernels.report import Kernel, markdown
from verl_precision.patch.releases import load_releases
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.paths import CACHE, PROGRAM, SCRIPTS
from verl_precision.process import json_lines

GEMMA = "Gemma-4, global layers"


def compiled_attention(generation: str, *models: str) -> list[dict]:
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS), "TRITON_CACHE_DIR": str(CACHE / "triton")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, Path(__file__).with_name("compile_attention.py"), generation, *models]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.subprocess
def test_attention_of_512_dimensions_exceeds_a_t4_which_gets_no_tensor_cores():
    """https://github.com/vllm-project/vllm/issues/57712, https://github.com/triton-lang/triton/pull/5066."""
    small, large = compiled_attention("sm75", "Qwen2.5-0.5B", GEMMA)
    assert small["kernels"] == ["kernel_unified_attention"] * 2 + ["reduce_segments"]  # a prefill, a decode in segments
    assert (small["shared"], small["fits"], small["error"]) == (12288, True, "")
    assert (large["shared"], large["fits"]) == (98304, False)
    assert small["tensor_cores"] == large["tensor_cores"] == 0 and small["dots"] == large["dots"] == 2


@pytest.mark.slow
@pytest.mark.subprocess
def test_attention_of_an_a100_fits_and_uses_tensor_cores():
    small, large = compiled_attention("sm80", "Qwen2.5-0.5B", GEMMA)
    assert small["fits"] and large["fits"] and not small["spilled"]
    assert small["tensor_cores"] > 0 and large["tensor_cores"] > small["tensor_cores"]


@pytest.mark.subprocess
@pytest.mark.slow
def test_arithmetic_of_the_fused_head_fails_at_very_negative_logits_only():
    """https://github.com/verl-project/verl/issues/7439."""
    rows = {
        (row["kernel"], row["situation"]): row
        for row in json_lines("kernels.arithmetic", "float16", environment={})
        if "kernel" in row
    }
    fused = {situation: row for (kernel, situation), row in rows.items() if kernel == "verl: fused head"}
    assert fused["usual logits"]["log_prob"] < 1e-5 and fused["all logits near -56"]["log_prob"] < 1e-4
    assert fused["all logits near -116"]["log_prob"] == math.inf
    assert (
        math.isfinite(fused["all logits near -100"]["log_prob"]) and fused["all logits near -100"]["weight"] == math.inf
    )
    without = [row for (kernel, _), row in rows.items() if kernel != "verl: fused head"]
    assert all(math.isfinite(row.get("log_prob", 0)) for row in without)
    assert max(row["output"] for row in without if "output" in row) < 1e-3


@pytest.mark.subprocess
def test_bfloat16_is_not_interpreted():
    code = "from verl_precision.kernels.arithmetic import main; main('bfloat16')"
    done = subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS, capture_output=True, text=True)
    assert "bfloat16: Triton's interpreter is used for float16 and float32 only" in done.stderr and done.returncode == 1


@pytest.mark.parametrize("release", load_releases())
def test_fused_head_in_torch_loses_the_gradient_before_0_9_0(release, tmp_path):
    """https://github.com/verl-project/verl/pull/7235: where ``flatten`` copies the hidden states of several rows."""
    file = unpacked_wheel(release, tmp_path / "verl") / "verl/utils/experimental/torch_functional.py"
    spec = importlib.util.spec_from_file_location(f"torch_functional_{release.replace('.', '_')}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gradients = {}
    for rows, transposed in ((2, False), (1, True), (2, True)):
        states = torch.randn(7, rows, 16, requires_grad=True)
        hidden = states.transpose(0, 1) if transposed else states.transpose(0, 1).contiguous()
        log_probs, _ = module.FusedLinearForPPO()(hidden, torch.randn(50, 16, requires_grad=True), torch.zeros(rows, 7))
        log_probs.sum().backward()
        gradients[rows, transposed] = states.grad is not None
    assert gradients == {(2, False): True, (1, True): True, (2, True): release >= "0.9"}


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["GPU=sm99"], "GPU=sm99: must be one of sm70, sm75, sm80, sm86, sm89, sm90, sm100, sm120"),
        (["PRECISION=fp32"], "PRECISION=fp32: must be one of fp16, bf16"),
        (["GPUS=sm80"], "GPUS: is not a variable of this command; did you mean GPU?"),
    ],
)
def test_bad_word_is_refused(words, refusal):
    with pytest.raises(Refused, match=refusal.replace("?", r"\?")):
        check_kernels.parse(words)


def test_triton_without_ptxas_is_refused(monkeypatch):
    from triton import knobs

    class Stripped:
        @property
        def ptxas(self):
            raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(knobs, "nvidia", Stripped())
    with pytest.raises(Refused, match=r"triton 3\.\S+: Cannot find ptxas; reinstall triton from PyPI, which has ptxas"):
        check_kernels.check_compiler()


def test_worker_that_fails_is_named_with_its_last_line():
    with pytest.raises(Refused, match="kernels.worker sm99: ended with exit code 1: KeyError: 'sm99'"):
        list(json_lines("kernels.worker", "sm99", environment={}))


def test_code_that_asks_for_the_gpu_is_told_of_the_named_one():
    from verl_precision.kernels.launches import recorded

    with recorded(GENERATIONS["sm75"]):
        assert torch.cuda.get_device_capability() == (7, 5)
        assert torch.cuda.get_device_properties(0).name == "Tesla T4"
        assert torch.empty(0, device="meta").is_cuda
    assert not torch.empty(0).is_cuda


def running(parent: int) -> list[psutil.Process]:
    """Return the two workers of a ``check-kernels`` for one generation, once both have started."""
    children = psutil.Process(parent).children()
    workers = [child for child in children if any("verl_precision.kernels." in word for word in child.cmdline())]
    return workers if len(workers) == 2 else []


@pytest.mark.subprocess
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_workers_too(number, tmp_path):
    command = [*PROGRAM, "check-kernels", "--gpu=sm90", f"--out={tmp_path / 'out'}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        workers = wait_until(lambda: running(process.pid), "no worker")
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == 130
    assert not psutil.wait_procs(workers, TIMEOUT_S)[1] and not (tmp_path / "out").exists()


def test_a_kernel_that_is_not_installed_is_left_out():
    from verl_precision.kernels.cases import Missing, load, load_file

    with pytest.raises(Missing, match="torch.no_such.kernel: No module named 'torch.no_such'"):
        load("torch.no_such", "kernel")
    with pytest.raises(Missing, match="torch.kernel: module 'torch' has no attribute 'kernel'"):
        load("torch", "kernel")
    with pytest.raises(Missing, match="no_such_package is not installed"):
        load_file("no_such_package", "kernel.py")


def kernel(generation: str, dtype: str = "float16", **found: object) -> Kernel:
    compiled = {"error": "", "shared": 0, "registers": 32, "spilled": 0, "tensor_cores": 0, "dots": 0}
    named = {"group": "attention", "kernel": "attend", "models": ["A", "B"]}
    return Kernel.read({"generation": generation, "dtype": dtype, **named, **compiled, **found})


def test_page_counts_what_runs_and_lists_what_does_not():
    kernels = [kernel("sm75", shared=98304, dots=2), kernel("sm75", "bfloat16", shared=98304)]
    kernels += [
        kernel("sm80", shared=98304, dots=2, tensor_cores=8, spilled=1024),
        kernel("sm80", "bfloat16", error="E: no"),
    ]
    row = {"kernel": "head", "situation": "usual", "dtype": "float16", "log_prob": 0.00123, "weight": math.inf}
    page = markdown(kernels, [row], ["flash_attn is not installed"], "triton 3", "make check-kernels")
    for line in (
        "| kernels | sm75 (T4) | sm80 (A100) |",
        "| attention | **0 of 1**, 96 KiB | 1, 96 KiB |",
        "| sm75 (T4) | attention | `attend` | A, B | float16, bfloat16 | 98,304 bytes of 65,536 |",
        "| sm80 (A100) | attention | `attend` | A, B | bfloat16 | E: no |",
        "| attention | 0 of 1 | 1 of 1 |",
        "| attention | none | 1,024 bytes |",
        "| head | usual | float16 | log p 0.0012; gradient of the head inf |",
        "| attention | `attend` | A, B | **96 KiB, 32** | 96 KiB, 32, 1,024 |",
        "- flash_attn is not installed",
    ):
        assert line in page.splitlines(), f"{line}\n{page}"


def test_default_generations_are_known():
    assert set(DEFAULT) <= set(GENERATIONS)
