"""Cases of verl's FSDP engine with ``keep_fp32_modules``, a key of patched trees."""

import torch
import torch.distributed as dist
from fsdp_worker import (
    MODEL,
    RANK,
    batch,
    composed,
    make_worker,
    metrics_of,
    same,
    settings,
    shared_directory,
    state,
    weights_of,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker


def overflowing_model() -> str:
    """Save a copy of MODEL whose first block overflows in gate * up; down scales it back, and all else stays small."""
    directory = shared_directory()
    if RANK == 0:
        model = AutoModelForCausalLM.from_pretrained(MODEL)
        mlp = model.model.layers[0].mlp
        with torch.no_grad():
            mlp.gate_proj.weight *= 1000
            mlp.up_proj.weight *= 1000
            mlp.down_proj.weight /= 1e6
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(MODEL).save_pretrained(directory)
    dist.barrier()
    return directory


def hf_name(name: str) -> str:
    parts = [part for part in name.split(".") if part != "_fsdp_wrapped_module"]
    return ".".join(parts).removeprefix("base_model.model.")


def watch_dtypes(worker: TrainingWorker, *names: str) -> dict[str, list[str]]:
    """Return a dict that a forward pass fills: for each module the dtypes of its weight, if any, input and output."""
    recorded: dict[str, list[str]] = {}

    def hook_of(name):
        def hook(module, args, kwargs, output):
            tensors = [getattr(module, "weight", None), *args, *kwargs.values(), output]
            dtypes = [t.dtype for t in tensors if torch.is_tensor(t) and t.is_floating_point()]
            recorded[name] = [str(dtype).removeprefix("torch.") for dtype in dtypes]

        return hook

    for name, module in worker.engine.module.named_modules():
        if hf_name(name) in names and not isinstance(module, FullyShardedDataParallel):
            module.register_forward_hook(hook_of(hf_name(name)), with_kwargs=True)
    return recorded


def keep_fp32():
    """Train the overflowing model in fp16, with kept modules, and in fp32: dtypes, updates, exported names."""
    model = overflowing_model()
    # down_proj is in a kept module already.
    patterns = ["lm_head", "model.layers.0.mlp", "*.0.mlp.down_proj"]
    inside = ("model.layers.0.mlp.down_proj", "model.layers.0.mlp", "model.layers.1.mlp.down_proj", "lm_head")
    result, updates = {}, {}
    for case, engine in {
        "float16": {},
        "kept": {"keep_fp32_modules": patterns},
        "float32": {"dtype": "float32"},
    }.items():
        worker = make_worker(path=model, **engine)
        # An SGD update is the clipped gradient; the rate scales it above the rounding error of the weights.
        worker.engine.optimizer = torch.optim.SGD(worker.engine.module.parameters(), lr=1e9)
        before = weights_of(worker)
        recorded = watch_dtypes(worker, *inside)
        metrics = metrics_of(worker.train_batch(batch(1)))
        updates[case] = {name: tensor - before[name] for name, tensor in weights_of(worker).items()}
        result[case] = {
            "grad_norm": metrics.get("grad_norm"),
            "skipped": metrics["skipped_steps"],
            "dtypes": recorded,
            "exported": sorted((name, str(tensor.dtype)) for name, tensor in before.items()),
            "kept": list(worker.engine.kept_in_fp32),
        }
    difference = {name: (updates["kept"][name] - u).norm() / u.norm() for name, u in updates["float32"].items()}
    result["update_error"] = {name: value.item() for name, value in difference.items()}
    return result


def keep_fp32_critic():
    """Train a critic with a kept head and a kept projection: dtypes, grad norm."""
    worker = make_worker("critic", keep_fp32_modules=["score", "*.q_proj"], grad_scaler=settings(init_scale=1024.0))
    recorded = watch_dtypes(worker, "score", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj")
    return {"dtypes": recorded, "grad_norm": metrics_of(worker.train_batch(batch(1)))["grad_norm"]}


def keep_fp32_ref():
    """Run an offloaded ref with a kept head and projection: dtypes, and the list that it inherits from the actor."""
    worker = make_worker("ref", keep_fp32_modules=["lm_head", "*.q_proj"])
    recorded = watch_dtypes(worker, "lm_head", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj")
    data = batch()
    tu.assign_non_tensor(data, compute_loss=False)
    worker.infer_batch(data)
    follows = composed("actor_rollout_ref.actor.fsdp_config.keep_fp32_modules=[lm_head]").actor_rollout_ref.ref
    return {"dtypes": recorded, "follows": list(follows.fsdp_config.keep_fp32_modules)}


def keep_fp32_lora():
    """Train a kept Linear with its LoRA adapter: dtypes, grad norm, exports."""
    exported, result = [], {}
    for patterns in ([], ["model.layers.0.mlp.down_proj"]):
        worker = make_worker(model={"lora_rank": 4}, keep_fp32_modules=patterns)
        recorded = watch_dtypes(worker, *(f"model.layers.{i}.mlp.down_proj.base_layer" for i in (0, 1)))
        result = {"grad_norm": metrics_of(worker.train_batch(batch(1)))["grad_norm"], "dtypes": recorded}
        exported.append({(name, tensor.dtype) for name, tensor in worker.engine.get_per_tensor_param()[0]})
    return result | {"same_exports": exported[0] == exported[1]}


def keep_fp32_checkpoint():
    """Save and resume a worker with kept modules: its state and its next step."""
    directory = shared_directory()
    kept = {"keep_fp32_modules": ["lm_head", "*.mlp"], "grad_scaler": settings(init_scale=1024.0)}
    worker = make_worker(**kept)
    worker.train_batch(batch(1))
    worker.save_checkpoint(directory, global_step=1)
    fresh = make_worker(**kept)
    fresh.load_checkpoint(directory)
    result = {"state": same(state(worker), state(fresh))}
    before = state(worker)
    for each in (worker, fresh):
        each.train_batch(batch(2))
    return result | {"next_step": same(state(worker), state(fresh)), "stepped": not same(before, state(worker))}


CASES = {
    case.__name__: case for case in (keep_fp32, keep_fp32_critic, keep_fp32_ref, keep_fp32_lora, keep_fp32_checkpoint)
}
