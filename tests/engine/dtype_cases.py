"""Cases of verl's FSDP engine: the dtype of every hop, and the training trajectory in each regime."""

from functools import partial

import torch
import torch.distributed as dist
from fsdp_worker import batch, gradients, make_worker, metrics_of, name_of, settings, state


def dtype_per_hop():
    """Return the dtype of every hop of an actor with only ``dtype=float16`` set."""
    worker = make_worker(by_dtype_alone=True, grad_scaler=settings(init_scale=1024.0))
    hops = {}

    def watch_linear(module, args, output):
        hops["linear"] = name_of(output)
        hops["linear.weight"] = name_of(module.weight)

    def watch_buffer(module, args, output):
        hops["buffer"] = name_of(module.inv_freq)

    for name, module in worker.engine.module.named_modules():
        if name.endswith("rotary_emb"):
            module.register_forward_hook(watch_buffer)
        if name.endswith(("layers.0.mlp.up_proj", "layers.0._fsdp_wrapped_module.mlp.up_proj")):
            module.register_forward_hook(watch_linear)
    worker.train_batch(batch(0))
    entry = next(iter(worker.engine.optimizer.state.values()))
    return hops | {
        "scaler": worker.engine.scaler is not None,
        "autocast": str(worker.engine._autocast_dtype).removeprefix("torch."),
        "master": name_of(next(worker.engine.module.parameters())),
        "adam": name_of(entry["exp_avg"]),
    }


def trajectory(dtype: str, **engine):
    """Return the weights' sum and the grad norms after three steps, to compare two trees."""
    worker = make_worker(dtype=dtype, grad_scaler=settings(init_scale=1024.0), **engine)
    norms = [metrics_of(worker.train_batch(batch(seed)))["grad_norm"] for seed in range(3)]
    return {
        "norms": norms,
        "sum": sum(t.double().sum().item() for t in state(worker)),
        "lr": worker.engine.optimizer.param_groups[0]["lr"],
    }


def trajectory_fp16():
    """Train with both of torch's implementations of Adam; upstream's fused one raises on every rank."""
    try:
        fused = trajectory("float16", optimizer={"fused": True})
    except RuntimeError as error:
        fused = {"error": str(error)}
    return {"foreach": trajectory("float16"), "fused": fused}


def accumulation():
    """Accumulate eight equal micro-batches with scaled gradients of up to 30,000, whose sum is finite only in fp32."""

    def grad_norm(weight: float, deferred: bool, **engine):
        worker = make_worker(use_no_sync_for_gradient_accumulation=deferred, **engine)
        worker.engine_config.micro_batch_size_per_gpu = 1
        data = batch(5, size=8, distinct=False)
        data["weight"] = torch.full((8,), weight)
        largest = {}
        step = worker.engine.optimizer_step

        def measured_step():
            largest["grad"] = max(g.abs().max().item() for g in gradients(worker))
            return step()

        worker.engine.optimizer_step = measured_step
        norm = metrics_of(worker.train_batch(data)).get("grad_norm")
        return largest["grad"], norm

    total = torch.tensor(grad_norm(1.0, False, dtype="float32")[0])
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    weight = 30_000 * 8 / (total.item() * 1024.0)
    scaler = settings(init_scale=1024.0)
    return {
        "synced": grad_norm(weight, False, grad_scaler=scaler)[1],
        "deferred": grad_norm(weight, True, grad_scaler=scaler)[1],
        "fp32": grad_norm(weight, True, dtype="float32")[1],
    }


CASES = {
    "dtype_per_hop": dtype_per_hop,
    "trajectory_bf16": partial(trajectory, "bfloat16"),
    "trajectory_fp32": partial(trajectory, "float32"),
    "trajectory_fp16": trajectory_fp16,
    "accumulation": accumulation,
}
