"""Cases of verl's FSDP engine: LoRA adapters over a frozen base in 16 bits."""

import asyncio
import copy

import torch
from fsdp_worker import (
    PATCHED,
    REQUESTED,
    batch,
    composed,
    gradients,
    make_worker,
    metrics_of,
    name_of,
    same,
    settings,
    shared_directory,
    state,
    weights_of,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine_workers import ActorRolloutRefWorker

LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
MERGED = LORA | {"lora": {"merge": True}}


def lora_worker(dtype: str, base: str, model: dict = LORA):
    """Return a worker with the same adapters for each ``base``, the dtype of the frozen weights."""
    torch.manual_seed(0)
    scaler = {"grad_scaler": settings(init_scale=1024.0)} if dtype == "float16" else {}
    worker = make_worker("actor", dtype, model=model, model_dtype=base, warmup=0, **scaler, **REQUESTED)
    for adapter in local(worker)[0]:  # peft rounds the first ones to the base's dtype
        adapter.copy_(adapter.to(getattr(torch, dtype)))
    return worker


def local(worker) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return this rank's adapters and frozen weights."""
    parts = ([], [])
    for parameter in worker.engine.module.parameters():
        tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        parts[not parameter.requires_grad].append(tensor.detach())
    return parts


def clones(worker) -> list[list[torch.Tensor]]:
    return [[tensor.clone() for tensor in part] for part in local(worker)]


def train(worker) -> dict:
    """Train three steps; return the dtypes, the metrics and the outcome for adapters and base."""
    adapters, base = clones(worker)
    found, step = set(), worker.engine.optimizer_step

    def recorded():
        found.update(name_of(gradient) for gradient in gradients(worker))
        return step()

    worker.engine.optimizer_step = recorded
    norms = [metrics_of(worker.train_batch(batch(seed))).get("grad_norm") for seed in range(3)]
    trained, frozen = clones(worker)
    adam = [entry["exp_avg"] for entry in worker.engine.optimizer.state.values()]
    kinds = {"base": frozen, "adapters": trained, "adam": adam}
    return {
        "dtypes": {kind: sorted({name_of(tensor) for tensor in of}) for kind, of in kinds.items()}
        | {"gradients": sorted(found)},
        "norms": norms,
        "base_kept": same(base, frozen),
        "moved": not same(adapters, trained),
        "trained": trained,
    }


def lora_dtypes():
    """Train adapters over a base in 16 bits and over one in fp32, each computing in the same dtype."""
    result = {}
    for dtype in ("float16", "bfloat16"):
        if not PATCHED and dtype == "float16":
            continue  # upstream's fp16 diverges at the scaler already
        in_16_bits, in_fp32 = (train(lora_worker(dtype, base)) for base in (dtype, "fp32"))
        trained = (each.pop("trained") for each in (in_16_bits, in_fp32))
        equal = in_16_bits["norms"] == in_fp32["norms"] and same(*trained)
        result[dtype] = in_16_bits | {"as_over_fp32": equal, "norms_over_fp32": in_fp32["norms"]}
    return result


def merged_exactly(worker) -> dict[str, torch.Tensor]:
    """Return base + scaling B A in fp64 by exported name; every rank must call it."""
    tensors = {}
    with FullyShardedDataParallel.summon_full_params(worker.engine.module, writeback=False):
        for name, tensor in worker.engine.module.named_parameters():
            name = name.replace("_fsdp_wrapped_module.", "").removeprefix("base_model.model.")
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            tensors[name] = whole.detach().double()
    scaling = LORA["lora_alpha"] / LORA["lora_rank"]
    exact = {}
    for name, tensor in tensors.items():
        part = name.removesuffix(".base_layer.weight")
        if part != name:
            a, b = (tensors[f"{part}.lora_{each}.default.weight"] for each in "AB")
            tensor = tensor + scaling * b @ a
        if ".lora_" not in name:
            exact[name.replace(".base_layer", "")] = tensor
    return exact


def lora_merge():
    """Merge small adapters twice; return the largest error over the largest change, and whether the base stays.

    A change of 2^-13 of the weights is below half a unit in the last place of bf16, and near that of fp16.
    """
    result = {}
    for dtype in ("float16", "bfloat16") if PATCHED else ("bfloat16",):
        worker = lora_worker(dtype, dtype, model=MERGED)
        generator = torch.Generator().manual_seed(0)
        for adapter in local(worker)[0]:
            adapter.copy_(torch.randn(adapter.shape, generator=generator) * 1e-3)
        _, base = clones(worker)
        exact = merged_exactly(worker)
        first, second = weights_of(worker), weights_of(worker)
        largest = {"error": 0.0, "change": 0.0}
        for name, tensor in first.items():
            largest["error"] = max(largest["error"], (tensor.double() - exact[name]).abs().max().item())
        for name, tensor in weights_of(lora_worker(dtype, dtype, model=MERGED)).items():  # its B is zero
            largest["change"] = max(largest["change"], (exact[name] - tensor.double()).abs().max().item())
        result[dtype] = {
            "lost": largest["error"] / largest["change"],
            "dtypes": sorted({name_of(tensor) for tensor in first.values()}),
            "named_as_base": sorted(first) == sorted(exact),
            "repeats": all(torch.equal(first[name], second[name]) for name in first),
            "base_kept": same(base, local(worker)[1]),
        }
    return result


def lora_resume():
    """Save after a step and resume in a new worker; return whether it and its next step are bitwise equal."""
    directory = shared_directory()
    worker = lora_worker("float16", "fp16")
    worker.train_batch(batch(0))
    worker.save_checkpoint(directory, global_step=1)
    saved = copy.deepcopy(state(worker))
    after = [metrics_of(worker.train_batch(batch(1)))["grad_norm"], state(worker)]
    resumed = lora_worker("float16", "fp16")
    resumed.load_checkpoint(directory, del_local_after_load=False)
    loaded = same(saved, state(resumed)[: len(saved)])
    norm = metrics_of(resumed.train_batch(batch(1)))["grad_norm"]
    return {"loaded": loaded, "next_step": norm == after[0] and same(after[1], state(resumed))}


class Events(list):
    """What a weight sync does in turn; takes the place of the rollout, whose server needs a GPU to sleep."""

    async def resume(self, tags: list[str]) -> None:
        self.append(f"wake {tags[0]}")

    async def update_weights(self, weights, base_sync_done: bool, **kwargs) -> None:
        sent = dict(weights)
        self.append(f"send {'adapters' if base_sync_done else 'base'}")
        assert all(tensor.device.type == "cpu" and tensor.numel() for tensor in sent.values())
        assert sent and all((".lora_" in name) == base_sync_done for name in sent)

    def watch(self, name: str) -> None:
        """Record the calls of one of the engine's functions that move the base."""
        moves = getattr(transformer_impl, name)

        def recorded(*args, **kwargs):
            self.append(name.partition("_")[0])
            return moves(*args, **kwargs)

        setattr(transformer_impl, name, recorded)


def lora_sync():
    """Return the events of a first weight sync that sends the base, and of a second one, until all is sent."""
    lora = [f"actor_rollout_ref.model.{key}={value}" for key, value in LORA.items()]
    offload = "actor_rollout_ref.actor.fsdp_config.param_offload=true"
    worker = ActorRolloutRefWorker(composed(*lora, offload).actor_rollout_ref, role="actor")
    worker.init_model()
    worker.layered_summon, worker.peft_merge, worker.base_sync_done = False, False, False
    events = worker.rollout = Events()
    events.watch("load_fsdp_model_to_gpu")
    events.watch("offload_fsdp_model_to_cpu")
    syncs = []
    for _ in range(2):
        asyncio.run(worker.update_weights(mode="naive"))
        syncs.append(events[: events.index("send adapters") + 1])
        events.clear()
    return syncs


def lora_merge_in_outer_units():
    """Merge adapters that FSDP1 has put into a unit around their layers; return the refusal, or the error's class."""
    outer = {"wrap_policy": {"min_num_params": 1000}}
    worker = make_worker("actor", "bfloat16", model=MERGED, warmup=0, **outer, **REQUESTED)
    for adapter in local(worker)[0]:
        adapter.fill_(1e-2)
    exact = merged_exactly(worker)
    try:
        sent = weights_of(worker)
    except Exception as error:  # upstream's kind of failure is what this case returns
        return f"{type(error).__name__}: {error}"
    return max((tensor.double() - exact[name]).abs().max().item() for name, tensor in sent.items())


CASES = {case.__name__: case for case in (lora_dtypes, lora_merge, lora_merge_in_outer_units, lora_resume, lora_sync)}
