"""verl without a GPU: each adaptation, in a process that loads it as verl's workers do."""

import os
import subprocess
import sys

import pytest

from lib.paths import REPO


def run(code: str, loaded: bool = True, ranks: int = 1) -> str:
    """Return what ``code`` prints on rank 0, with the platform loaded by verl's own hook, or without it."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu"}
    if loaded:
        environment |= {"VERL_USE_EXTERNAL_MODULES": "recipes.cpu.platform", "VERL_ENGINE_DEVICE": "cuda"}
        code = f"import verl\n{code}"
    command = [sys.executable, "-c", code]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--no-python"]
        command = [sys.executable, *torchrun, *command]
    done = subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_verl_selects_the_cpu():
    out = run(
        "from verl.utils.device import get_device_id, get_device_name, get_nccl_backend\n"
        "import importlib.metadata as m, torch\n"
        "print(get_device_name(), torch.ones(1).to(get_device_id()).device, get_nccl_backend(), m.version('vllm'))\n"
        "print(f'cpu:{get_device_id()}')"
    )
    assert out.split()[:3] == ["cpu", "cpu", "gloo"] and out.split()[3].endswith("+cpu")
    assert out.split()[4] == "cpu:0"


def test_what_verl_asks_of_a_gpu_works():
    """FSDP pins what it offloads, and verl builds a critic with its default attention."""
    shape = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    out = run(
        "import torch\n"
        "from transformers import AutoModelForCausalLM, Qwen2Config\n"
        f"config = Qwen2Config(vocab_size=8, **dict.fromkeys({shape}, 4))\n"
        "model = AutoModelForCausalLM.from_config(config, attn_implementation='flash_attention_2')\n"
        "print(torch.ones(1).pin_memory().item(), model.config._attn_implementation)"
    )
    assert out.split() == ["1.0", "sdpa"]


FP32_ON_CUDA = """
import torch
import torch.nn.functional as F
x = torch.rand(4, 8, dtype=torch.float16)
with torch.autocast("cpu", torch.float16):
    results = [F.log_softmax(x, -1), F.softmax(x, -1), torch.logsumexp(x, -1), x.exp(), x.pow(2), x.sum(-1), x.log()]
    product = F.linear(x, torch.rand(3, 8))
print(*(str(r.dtype).removeprefix("torch.") for r in results), str(product.dtype).removeprefix("torch."))
"""


def test_autocast_rounds_where_cudas_does():
    *wide, product = run(FP32_ON_CUDA).split()
    assert set(wide) == {"float32"} and product == "float16"
    # torch's own CPU autocast leaves some of them in half precision.
    *wide, product = run(FP32_ON_CUDA, loaded=False).split()
    assert "float16" in wide and product == "float16"


def test_fp16_products_are_fp32_products_rounded_to_fp16():
    out = run(
        "import torch, torch.nn.functional as F\n"
        "torch.manual_seed(0)\n"
        "x, w = torch.randn(64, 512).half(), torch.randn(96, 512).half()\n"
        "exact = (x.float() @ w.float().T).half()\n"
        "with torch.autocast('cpu', torch.float16):\n"
        "    print(torch.equal(F.linear(x, w), exact), torch.equal(x @ w.T, exact))\n"
        "from recipes.cpu.host import linear\n"
        "bias = torch.randn(96).half()\n"
        "biased = F.linear(x.float(), w.float(), bias.float()).half()\n"
        "print(torch.equal(linear(x, w, None), exact), torch.equal(linear(x, w, bias), biased))"
    )
    assert out.split() == ["True"] * 4


def test_gradients_flow_through_the_products_and_match_fp32():
    out = run(
        "import torch, torch.nn.functional as F\n"
        "torch.manual_seed(0)\n"
        "x, w = torch.randn(16, 32), torch.randn(8, 32, requires_grad=True)\n"
        "exact, = torch.autograd.grad(F.linear(x, w).square().sum(), w)\n"
        "with torch.autocast('cpu', torch.float16):\n"
        "    loss = F.linear(x, w).square().sum()\n"
        "grad, = torch.autograd.grad(loss, w)\n"
        "print(grad.dtype, ((grad - exact).norm() / exact.norm()).item())"
    )
    dtype, error = out.split()
    assert dtype == "torch.float32" and 0 < float(error) < 2e-3


FSDP1 = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
dist.init_process_group("cpu:gloo,cpu:gloo")
torch.manual_seed(dist.get_rank())  # the ranks differ until they are synchronised
module = FSDP(torch.nn.Linear(4, 4), device_id=torch.device("cpu"), sync_module_states=True)
with FSDP.summon_full_params(module):
    weights = [torch.zeros(4, 4) for _ in range(2)]
    dist.all_gather(weights, module.weight.detach().contiguous())
print("same", torch.equal(*weights))
"""


def test_two_ranks_synchronise_fsdp1_over_gloo():
    assert "same True" in run(FSDP1, ranks=2)
    with pytest.raises(AssertionError, match="cpu:gloo"):
        run(FSDP1, loaded=False, ranks=2)


def test_missing_attribute_is_named():
    out = run(
        "from types import SimpleNamespace\n"
        "from recipes.cpu import host\n"
        "owner = SimpleNamespace(__name__='vllm')\n"
        "try: host.wrap_attribute(owner, 'gone', lambda old: old)\n"
        "except ImportError as error: print(error)"
    )
    assert "vllm has no gone" in out and len(out.splitlines()) == 1


EXPERTS = """
import torch
import torch.nn.functional as F
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
torch.manual_seed(0)
x, w13, w2 = (torch.randn(shape).half() / 8 for shape in ((16, 64), (4, 128, 64), (4, 64, 64)))
weights, experts = torch.rand(16, 2), torch.stack([torch.randperm(4)[:2] for _ in range(16)]).int()
loaded = [cpu_moe.cpu_prepack_moe_weight(torch.zeros_like(w), "vec").copy_(w) for w in (w13, w2)]  # as verl loads them
out = cpu_moe.cpu_fused_moe(x, *loaded, None, None, weights, experts, "silu", "vec", False).float()
def expert(row, index):
    gate, up = F.linear(row, w13[index].float()).chunk(2)
    return F.linear(F.silu(gate) * up, w2[index].float())
rows = zip(x.float(), weights, experts.tolist())
exact = torch.stack([sum(w * expert(row, i) for w, i in zip(ws, indices)) for row, ws, indices in rows])
print(((out - exact).norm() / exact.norm()).item())
"""


def test_experts_compute_with_the_last_loaded_weights():
    assert float(run(EXPERTS).split()[-1]) < 2e-3  # fp16's rounding
    assert float(run(EXPERTS, loaded=False).split()[-1]) > 0.5, "vLLM reads them as packed"
