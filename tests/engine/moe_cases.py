"""Cases of tiny mixtures of experts on verl's FSDP engine."""

import torch
import torch.distributed as dist
from dtype_cases import watch_dtypes
from fsdp_worker import MODEL, PATCHED, RANK, batch, make_worker, metrics_of, shared_directory
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

GATE, EXPERTS = "model.layers.0.mlp.gate", "model.layers.0.mlp.experts"
FAMILIES = {
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},  # its class lists the gate
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 0},  # scores without scale
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
}


def save_mixture(family: str) -> str:
    """Save a mixture of 4 experts with MODEL's vocabulary."""
    directory = shared_directory()
    if RANK == 0:
        like = AutoConfig.from_pretrained(MODEL)
        own = {"moe_intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 16, "initializer_range": 0.2}
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        shape = {name: getattr(like, name) for name in names} | own | FAMILIES[family]
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape), dtype=torch.float32)
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(MODEL).save_pretrained(directory)
    dist.barrier()
    return directory


def train(path: str, dtype: str, **engine) -> dict:
    """Train a step; return the dtypes of a router and of what reaches the experts, and what the worker reports."""
    worker = make_worker(path=path, dtype=dtype, **engine)
    recorded = watch_dtypes(worker, GATE, EXPERTS)
    metrics = metrics_of(worker.train_batch(batch(1)))
    kept = worker.engine.kept_in_fp32.names() if PATCHED else {}
    return {"dtypes": recorded, "kept": kept, "finite": metrics.get("grad_norm", 0) > 0}


def listed_routers():
    """Train a model whose class lists its routers, in both 16-bit dtypes."""
    path = save_mixture("ernie4_5_moe")
    return {dtype: train(path, dtype) for dtype in ("float16", "bfloat16")}


def kept_routers():
    """Train mixtures with and without fp32 routers."""
    return {
        family: {
            name: train(save_mixture(family), "float16", keep_fp32_modules=patterns)
            for name, patterns in {"none": [], "kept": ["model.layers.*.gate"]}.items()
        }
        for family in ("qwen3_moe", "glm4_moe")
    }


CASES = {case.__name__: case for case in (listed_routers, kept_routers)}
