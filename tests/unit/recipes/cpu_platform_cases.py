"""Print what torch, verl and vLLM do in this process, as JSON: ``cpu_platform_cases.py CASE...``.

``test_cpu_platform.py`` starts it with and without the CPU platform. A case that fails returns the error's text.
"""

import importlib.metadata
import inspect
import json
import os
import sys
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

if "VERL_USE_EXTERNAL_MODULES" in os.environ:
    import verl  # noqa: F401  loads the platform, as in verl's workers
RANKS = 2


def selected() -> list[str]:
    from verl.utils.device import get_device_id, get_device_name, get_nccl_backend

    moved = torch.ones(1).to(get_device_id()).device
    version = importlib.metadata.version("vllm")
    return [get_device_name(), str(moved), f"cpu:{get_device_id()}", get_nccl_backend(), version.partition("+")[2]]


def pinned() -> float:
    return torch.ones(1).pin_memory().item()


def attention() -> str:
    """Build a model with verl's default attention."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    shape = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = Qwen2Config(vocab_size=8, **dict.fromkeys(shape, 4))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2")
    return model.config._attn_implementation


def autocast() -> dict[str, str]:
    """Return the dtypes of operators that CUDA's autocast runs in fp32, and that of a product."""
    x, weight = torch.rand(4, 8, dtype=torch.float16), torch.rand(3, 8)
    operators = {
        "log_softmax": lambda: F.log_softmax(x, -1),
        "softmax": lambda: F.softmax(x, -1),
        "pow": lambda: x.pow(2),
        "sum": lambda: x.sum(-1),
        "product": lambda: F.linear(x, weight),
    }
    with torch.autocast("cpu", torch.float16):
        return {name: str(operator().dtype) for name, operator in operators.items()}


def products() -> dict[str, bool]:
    """Compare fp16 products, under autocast and of the rollout's layers, with rounded fp32 products."""
    from recipes.cpu.host import linear

    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape).half() for shape in ((64, 512), (96, 512), (96,)))
    exact = (x.float() @ weight.float().T).half()
    biased = F.linear(x.float(), weight.float(), bias.float()).half()
    with torch.autocast("cpu", torch.float16):
        found = {"linear": (F.linear(x, weight), exact), "matmul": (x @ weight.T, exact)}
    found |= {"rollout": (linear(x, weight, None), exact), "bias": (linear(x, weight, bias), biased)}
    return {name: torch.equal(*pair) for name, pair in found.items()}


def wrap_rank(rank: int, folder: str) -> None:
    """Wrap a layer whose weights differ between ranks in FSDP1, and compare the ranks' weights."""
    dist.init_process_group("cpu:gloo,cpu:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    module = FSDP(torch.nn.Linear(4, 4), device_id=torch.device("cpu"), sync_module_states=True)
    with FSDP.summon_full_params(module):
        weights = [torch.zeros(4, 4) for _ in range(RANKS)]
        dist.all_gather(weights, module.weight.detach().contiguous())
    assert torch.equal(*weights), "the ranks' weights differ"
    dist.destroy_process_group()


def fsdp1() -> str:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(wrap_rank, (folder,), nprocs=RANKS, start_method="fork")
    return "synchronised"


def experts() -> float:
    """Return the error of a mixture of experts in vLLM whose weights are loaded as verl loads them."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    torch.manual_seed(0)
    x, w13, w2 = (torch.randn(shape).half() / 8 for shape in ((16, 64), (4, 128, 64), (4, 64, 64)))
    weights, chosen = torch.rand(16, 2), torch.stack([torch.randperm(4)[:2] for _ in range(16)]).int()
    loaded = [cpu_moe.cpu_prepack_moe_weight(torch.zeros_like(each), "vec").copy_(each) for each in (w13, w2)]
    words = [x, *loaded, None, None, weights, chosen, "silu", "vec", False]
    if "out" in inspect.signature(cpu_moe.cpu_fused_moe).parameters:  # vLLM 0.30 and later
        cpu_moe.cpu_fused_moe(out := torch.empty_like(x), *words)
    else:
        out = cpu_moe.cpu_fused_moe(*words)

    def expert(row: torch.Tensor, index: int) -> torch.Tensor:
        gate, up = F.linear(row, w13[index].float()).chunk(2)
        return F.linear(F.silu(gate) * up, w2[index].float())

    exact = torch.zeros(16, 64)
    for row, indices in enumerate(chosen.tolist()):
        for weight, index in zip(weights[row], indices, strict=True):
            exact[row] += weight * expert(x[row].float(), index)
    return ((out.float() - exact).norm() / exact.norm()).item()


def adapter() -> list[str]:
    """Return the names in vLLM of the layers of a LoRA adapter that verl sends, by vLLM's own table of names."""
    from vllm.model_executor.models.utils import WeightsMapper

    from verl.utils.vllm.utils import LoRAModel, LRUCacheWorkerLoRAManager, TensorLoRARequest, VLLMHijack

    VLLMHijack.hijack()
    mapper = WeightsMapper(
        orig_to_new_prefix={"model.": "language_model."}, orig_to_new_stacked={".q_proj": (".qkv_proj", "q")}
    )
    manager = SimpleNamespace(
        _adapter_manager=SimpleNamespace(
            model=SimpleNamespace(hf_to_vllm_mapper=mapper), supported_lora_modules=[], packed_modules_mapping={}
        ),
        _lora_model_cls=LoRAModel,
        lora_config=SimpleNamespace(max_lora_rank=2, lora_dtype=torch.float16),
        vocab_size=8,
    )
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    request = TensorLoRARequest(
        lora_name="actor",
        lora_int_id=1,
        lora_path="unused",
        peft_config={"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]},
        lora_tensors={f"{layer}.lora_{side}.weight": torch.ones(2, 2) for side in "AB"},
    )
    return list(LRUCacheWorkerLoRAManager._load_adapter(manager, request).loras)


def repeats() -> dict[str, int]:
    """Return the number of responses to a prompt that the repaired hf rollouts of old releases sample, of 4."""
    from omegaconf import DictConfig

    import verl
    from recipes.cpu.legacy import repair_hf_rollout

    found = {}
    for release in ("0.4.1", "0.5.0"):

        class HFRollout:
            def __init__(self, module: None, config: DictConfig):
                self.n = config.n

            _generate_minibatch = None

        verl.__version__ = release
        repair_hf_rollout(SimpleNamespace(HFRollout=HFRollout))
        found[release] = HFRollout(None, DictConfig({"n": 4})).n
    return found


def outcome(name: str) -> object:
    try:
        return globals()[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    print(json.dumps({name: outcome(name) for name in sys.argv[1:]}))
