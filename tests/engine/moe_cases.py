"""Cases of verl's FSDP engine with mixtures of experts, whose routers are in fp32: listed by the class, or named."""

import torch
import torch.distributed as dist
from dtype_cases import watch_dtypes
from fsdp_worker import MODEL, RANK, REQUESTED, batch, make_worker, metrics_of, name_of, shared_directory, weights_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

GATE, EXPERTS = "model.layers.0.mlp.gate", "model.layers.0.mlp.experts"
FAMILIES = {
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},  # its class lists the gate
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
}


def save_mixture(family: str) -> str:
    """Save a mixture of 4 experts with MODEL's sizes and tokenizer."""
    directory = shared_directory()
    if RANK == 0:
        like = AutoConfig.from_pretrained(MODEL)
        own = {"moe_intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 16} | FAMILIES[family]
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        config = AutoConfig.for_model(family, **{name: getattr(like, name) for name in names}, **own)
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
        AutoTokenizer.from_pretrained(MODEL).save_pretrained(directory)
    dist.barrier()
    return directory


def train(family: str, dtype: str, **engine) -> dict:
    """Train a step; return the dtypes at a router and at its experts, and those that the router has on the wire."""
    worker = make_worker(path=save_mixture(family), dtype=dtype, **engine)
    recorded = watch_dtypes(worker, GATE, EXPERTS)
    metrics = metrics_of(worker.train_batch(batch(1)))
    return {
        "weight": recorded[GATE][0],
        "experts": recorded[EXPERTS],
        "wire": name_of(weights_of(worker)[f"{GATE}.weight"]),
        "trained": metrics["grad_norm"] > 0,
    }


def listed_routers():
    """Train a model whose class lists its routers, in both 16-bit dtypes."""
    return {dtype: train("ernie4_5_moe", dtype, **REQUESTED) for dtype in ("float16", "bfloat16")}


def kept_routers():
    """Train mixtures with routers that ``keep_fp32_modules`` names."""
    pattern = {"keep_fp32_modules": ["model.layers.*.gate"]}
    return {family: train(family, "float16", **pattern) for family in ("glm4_moe", "qwen3_moe")}


CASES = {case.__name__: case for case in (listed_routers, kept_routers)}
