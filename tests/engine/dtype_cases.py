"""Cases of verl's FSDP engine: the dtype of every hop, and modules kept in fp32, a key of patched trees."""

import contextlib
import io
import json
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from fsdp_worker import (
    MODEL,
    PATCHED,
    RANK,
    REQUESTED,
    batch,
    gradients,
    lr_of,
    make_worker,
    metrics_of,
    name_of,
    poison_gradient,
    settings,
    shared_directory,
    state,
    weights_of,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from verl.workers.engine_workers import TrainingWorker


def watch_dtypes(worker: TrainingWorker, *names: str) -> dict[str, list[str]]:
    """Return a dict that a forward pass fills: for each module the dtypes of its weight, if any, input and output."""
    recorded: dict[str, list[str]] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        def hook(module, args, kwargs, output):
            tensors = [getattr(module, "weight", None), *args, *kwargs.values(), output]
            recorded[name] = [name_of(t) for t in tensors if torch.is_tensor(t) and t.is_floating_point()]

        module.register_forward_hook(hook, with_kwargs=True)

    for name, module in worker.engine.module.named_modules():
        parts = [part for part in name.split(".") if part != "_fsdp_wrapped_module"]
        own = ".".join(parts).removeprefix("base_model.model.")
        if own in names and not isinstance(module, FullyShardedDataParallel):
            watch(own, module)
    return recorded


def dtype_per_hop():
    """Return the dtype of every hop of an actor with only ``dtype=float16`` set."""
    worker = make_worker(by_dtype_alone=True, grad_scaler=settings(init_scale=1024.0))
    recorded, engine = watch_dtypes(worker, "model.layers.0.mlp.up_proj"), worker.engine
    worker.train_batch(batch(0))
    (rotary,) = (module for name, module in engine.module.named_modules() if name.endswith("rotary_emb"))
    return {
        "linear": recorded["model.layers.0.mlp.up_proj"],
        "scaler": engine.scaler is not None,
        "autocast": str(engine._autocast_dtype).removeprefix("torch."),
        "buffer": name_of(rotary.inv_freq),
        "master": name_of(next(engine.module.parameters())),
        "adam": name_of(next(iter(engine.optimizer.state.values()))["exp_avg"]),
    }


def hooks(**engine) -> dict:
    """Return what the hooks make of an actor in bfloat16 that overflows, of adapters over such a base, and of a critic.

    The model's class lists a module to keep in fp32.
    """
    directory, printed = shared_directory(), io.StringIO()
    listed, watched = (
        mock.patch.object(Qwen2ForCausalLM, "_keep_in_fp32_modules_strict", {"up_proj"}),
        "model.layers.0.mlp",
    )
    with contextlib.redirect_stdout(printed), listed:
        worker = make_worker("actor", "bfloat16", True, warmup=4, **engine)
        adapted = make_worker("actor", "bfloat16", True, model={"lora_rank": 4}, model_dtype="bf16", **engine)
        eager = {"override_config": {"attn_implementation": "eager"}}
        critic = make_worker("critic", "bfloat16", True, model=eager, **engine)
    recorded = watch_dtypes(worker, f"{watched}.up_proj", f"{watched}.down_proj")
    poison_gradient(worker)
    metrics = metrics_of(worker.train_batch(batch(0)))
    lr = lr_of(worker)
    worker.save_checkpoint(directory, global_step=1)
    dist.barrier()
    extra = Path(directory) / f"extra_state_world_size_{dist.get_world_size()}_rank_{RANK}.pt"
    return {
        "reports": printed.getvalue().count("[verl-precision] "),
        "metrics": {key: str(metrics[key]) for key in ("grad_norm", "skipped_steps", "loss_scale") if key in metrics},
        "lr": lr,
        "weights": [recorded[f"{watched}.{name}"][0] for name in ("up_proj", "down_proj")],
        "extra_state": sorted(torch.load(extra, weights_only=False)),
        "dtype_recorded": json.loads((Path(directory) / "fsdp_config.json").read_text()).get("dtype"),
        "adapters": sorted({name_of(each) for each in adapted.engine.module.parameters() if each.requires_grad}),
        "attention": critic.engine.module.config._attn_implementation,
    }


def requests():
    """Return the outcomes of ``hooks`` by the key that requests a precision: none, and each kind."""
    keys = {"none": {}}
    if PATCHED:
        keys["dtype=bfloat16 of the role"] = REQUESTED
        keys["grad_scaler"] = {"grad_scaler": settings(growth_interval=7)}
        keys["keep_fp32_modules"] = {"keep_fp32_modules": ["model.layers.1.mlp"]}
        keys["report_dtypes=false"] = REQUESTED | {"report_dtypes": False}
    return {name: hooks(**engine) for name, engine in keys.items()}


def trajectory_fp32():
    """Return the grad norms and the weights' sum after three steps, to compare two trees."""
    worker = make_worker(dtype="float32")
    norms = [metrics_of(worker.train_batch(batch(seed)))["grad_norm"] for seed in range(3)]
    return {"norms": norms, "sum": sum(t.double().sum().item() for t in state(worker))}


def agreement():
    """Return the distance of 16 bits from fp32 in one batch: of the log-probabilities and of all gradients.

    Both are norms of the difference over the norm of fp32's.
    """
    scales, found = {"float32": 1.0, "bfloat16": 1.0, "float16": 1024.0}, {}
    for dtype, scale in scales.items():
        worker = make_worker(dtype=dtype, **({"grad_scaler": settings(init_scale=scale)} if dtype == "float16" else {}))
        log_probs, grads = found[dtype] = [], []
        loss_fn, step = worker.loss_fn, worker.engine.optimizer_step

        def recorded_loss(model_output, data, dp_group=None, kept=log_probs, loss_fn=loss_fn):
            kept.append(model_output["log_probs"].detach().values().float())
            return loss_fn(model_output, data, dp_group)

        def recorded_step(kept=grads, of=worker, scale=scale, step=step):
            kept.extend(gradient.flatten().clone() / scale for gradient in gradients(of))
            return step()

        worker.set_loss_fn(recorded_loss)
        worker.engine.optimizer_step = recorded_step
        worker.train_batch(batch(1))
    exact = [torch.cat(tensors) for tensors in found.pop("float32")]
    return {
        dtype: {
            name: ((torch.cat(tensors) - reference).norm() / reference.norm()).item()
            for name, tensors, reference in zip(("log_probs", "gradients"), kept, exact, strict=True)
        }
        for dtype, kept in found.items()
    }


def accumulation():
    """Accumulate eight equal micro-batches with scaled gradients of up to 30,000, whose sum is finite only in fp32."""

    def grad_norm(weight: float, deferred: bool, **engine):
        worker = make_worker(use_no_sync_for_gradient_accumulation=deferred, **engine)
        worker.engine_config.micro_batch_size_per_gpu = 1
        data = batch(5, size=8, distinct=False)
        data["weight"] = torch.full((8,), weight)
        largest, step = [], worker.engine.optimizer_step

        def measured_step():
            largest.append(max(g.abs().max().item() for g in gradients(worker)))
            return step()

        worker.engine.optimizer_step = measured_step
        return metrics_of(worker.train_batch(data)).get("grad_norm"), largest[0]

    total = torch.tensor(grad_norm(1.0, False, dtype="float32")[1])
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    weight = 30_000 * 8 / (total.item() * 1024.0)
    scaler = settings(init_scale=1024.0)
    return {
        "synced": grad_norm(weight, False, grad_scaler=scaler)[0],
        "deferred": grad_norm(weight, True, grad_scaler=scaler)[0],
        "fp32": grad_norm(weight, True, dtype="float32")[0],
    }


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


def keep_fp32():
    """Train the overflowing model in fp16, with kept modules, and in fp32: dtypes, updates, exported names."""
    model = overflowing_model()
    # down_proj is in a kept module already.
    patterns = ["lm_head", "model.layers.0.mlp", "*.0.mlp.down_proj"]
    inside = ("model.layers.0.mlp.down_proj", "model.layers.0.mlp", "model.layers.1.mlp.down_proj", "lm_head")
    engines = {"float16": {}, "kept": {"keep_fp32_modules": patterns}, "float32": {"dtype": "float32"}}
    result, updates = {}, {}
    for case, engine in engines.items():
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
            "kept": worker.engine.kept_in_fp32.names().get("keep_fp32", []),
        }
    difference = {name: (updates["kept"][name] - u).norm() / u.norm() for name, u in updates["float32"].items()}
    return result | {"update_error": {name: value.item() for name, value in difference.items()}}


def keep_fp32_critic():
    """Train a critic with a kept head: its dtypes, and the grad norm."""
    worker = make_worker("critic", keep_fp32_modules=["score"], grad_scaler=settings(init_scale=1024.0))
    recorded = watch_dtypes(worker, "score")
    return {"grad_norm": metrics_of(worker.train_batch(batch(1)))["grad_norm"]} | recorded


def attention_of_a_critic():
    """Return the attention of a critic for which ``eager`` is configured."""
    critic = make_worker("critic", model={"override_config": {"attn_implementation": "eager"}})
    return critic.engine.module.config._attn_implementation


def keep_fp32_lora():
    """Train a kept Linear with its LoRA adapter: dtypes, grad norm, exports."""
    exported, result = [], {}
    for patterns in ([], ["model.layers.0.mlp.down_proj"]):
        worker = make_worker(model={"lora_rank": 4}, keep_fp32_modules=patterns)
        recorded = watch_dtypes(worker, *(f"model.layers.{i}.mlp.down_proj.base_layer" for i in (0, 1)))
        result = {"grad_norm": metrics_of(worker.train_batch(batch(1)))["grad_norm"], "dtypes": recorded}
        exported.append({(name, tensor.dtype) for name, tensor in worker.engine.get_per_tensor_param()[0]})
    return result | {"same_exports": exported[0] == exported[1]}


CASES = {
    case.__name__: case
    for case in (
        *(dtype_per_hop, requests, trajectory_fp32, agreement, accumulation, attention_of_a_critic),
        *(keep_fp32, keep_fp32_critic, keep_fp32_lora),
    )
}
