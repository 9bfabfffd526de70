"""The cases of models with weights in two dtypes: modules in fp32 among others, LoRA adapters over a frozen base."""

from functools import partial

import harness
import torch
import torch.distributed as dist
from harness import ENGINE, RANK, Worker, batch, composed
from observations import local, name, same
from rollout_cases import WIRE
from torch.distributed.fsdp import FullyShardedDataParallel

from recipes.arithmetic.families import build_tokenizer
from recipes.arithmetic.model import build_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 16}
ROUTERS = "model.layers.*.gate"
KEPT = f"{ENGINE['actor']}.keep_fp32_modules=[{ROUTERS}]"


def mixture(family: str) -> str:
    """Save a tiny mixture of experts with random weights; return the override of its path."""
    folder = harness.shared_folder()
    if RANK == 0:
        tokenizer = build_tokenizer(family)
        for part in (tokenizer, build_model(tokenizer, 0, family, **EXPERTS)):
            part.save_pretrained(folder)
    dist.barrier()
    return f"actor_rollout_ref.model.path={folder}"


def in_forward(worker: Worker, kept: str) -> str:
    """Return the dtypes of ``kept`` modules and of a layer beside them in a forward pass."""
    observed: dict[str, str] = {}

    def weight(kind, part, args):
        observed[kind] = name(part.weight.dtype)

    def output(part, args, result):
        observed["output"] = name(result.dtype)

    for path, part in worker.module.named_modules():
        kind = path.removesuffix("._fsdp_wrapped_module").rpartition(".")[2]
        if kind in ("q_proj", kept) and not isinstance(part, FullyShardedDataParallel):
            part.register_forward_pre_hook(partial(weight, kind))
            if kind == kept:
                part.register_forward_hook(output)
    worker.forward(batch(0))
    return f"q_proj {observed['q_proj']}, {kept} {observed[kept]} returns {observed['output']}"


def routers_named() -> str:
    """Name the routers of a mixture in regime fp16."""
    return in_forward(Worker("actor", composed("+precision=fp16", mixture("qwen3_moe"), KEPT)), "gate")


def modules_listed() -> str:
    """Train a mixture in regime fp16 whose class lists its norms as fp32."""
    eager = "+actor_rollout_ref.model.override_config.attn_implementation=eager"  # it has no sdpa
    return in_forward(Worker("actor", composed("+precision=fp16", mixture("gpt_oss"), eager)), "input_layernorm")


def routers_rollout() -> str:
    """Return the rollout's list of modules where the actor names its routers, and the dtype in which these leave."""
    config = composed(*WIRE, mixture("qwen3_moe"), KEPT)
    weights, _ = Worker("actor", config).policy.get_per_tensor_param()
    left = {name(tensor.dtype) for path, tensor in weights if path.endswith(".gate.weight")}
    return f"{', '.join(config.actor_rollout_ref.rollout.keep_fp32_modules)} leave as {', '.join(left)}"


def lora_base() -> str:
    """Train adapters in regime fp16 over a frozen base in fp16, and the same adapters over one in fp32."""
    facts, trained = [], []
    for base in ("fp16", "fp32"):
        torch.manual_seed(0)
        keys = ["actor_rollout_ref.model.lora_rank=4", f"++{ENGINE['actor']}.model_dtype={base}"]
        worker = Worker("actor", composed("+precision=fp16", *keys))
        parts = ([], [])
        for parameter in worker.module.parameters():
            parts[parameter.requires_grad].append(local(parameter).detach())
        frozen, adapters = parts
        before = [tensor.clone() for tensor in frozen]
        for adapter in adapters:  # peft rounds the first ones to the base's dtype
            adapter.copy_(adapter.half())
        first = [tensor.clone() for tensor in adapters]
        for seed in range(4):  # the first steps may overflow at the initial scale
            worker.update(batch(seed))
        trained.append(adapters)
        if base == "fp16":
            adam = [entry["exp_avg"] for entry in worker.optimizer.state.values()]
            for kind, tensors in {"base": frozen, "adapters": adapters, "Adam": adam}.items():
                facts.append(f"{kind} {', '.join(sorted({name(tensor.dtype) for tensor in tensors}))}")
            facts += ["base stays" if same(before, frozen) else "BASE MOVES"]
            facts += ["adapters move" if not same(first, adapters) else "ADAPTERS STAY"]
    return ", ".join([*facts, "as over fp32" if same(*trained) else "OTHERS THAN OVER FP32"])
