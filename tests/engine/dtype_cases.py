"""Cases of verl's FSDP engine: the dtype of every hop, and the training trajectory in each regime."""

import torch
import torch.distributed as dist
from fsdp_worker import batch, gradients, make_worker, metrics_of, settings, state

from verl.utils import tensordict_utils as tu


def dtype_per_hop(role="actor"):
    """Return the dtype of every hop of a worker with only ``dtype=float16`` set."""
    worker = make_worker(role, by_dtype_alone=True)
    hops = {}

    def watch(name):
        def hook(module, args, kwargs, output):
            hops[name] = str(output.dtype).removeprefix("torch.")
            hops[name + ".weight"] = str(module.weight.dtype).removeprefix("torch.")

        return hook

    def watch_buffer(module, args, output):
        hops["buffer"] = str(module.inv_freq.dtype).removeprefix("torch.")

    for name, module in worker.engine.module.named_modules():
        if name.endswith("rotary_emb"):
            module.register_forward_hook(watch_buffer)
        if name.endswith("layers.0.mlp.up_proj") or name.endswith("layers.0._fsdp_wrapped_module.mlp.up_proj"):
            module.register_forward_hook(watch("linear"), with_kwargs=True)
    if role == "ref":
        data = batch()
        tu.assign_non_tensor(data, compute_loss=False)
        worker.infer_batch(data)
    else:
        for seed in range(8):  # the first steps may overflow at the initial scale
            worker.train_batch(batch(seed))
    hops["scaler"] = worker.engine.scaler is not None
    hops["autocast"] = str(worker.engine._autocast_dtype).removeprefix("torch.")
    hops["master"] = str(next(worker.engine.module.parameters()).dtype).removeprefix("torch.")
    if role != "ref":
        entry = next(iter(worker.engine.optimizer.state.values()))
        hops["adam"] = str(entry["exp_avg"].dtype).removeprefix("torch.")
    return hops


def dtype_per_hop_critic():
    return dtype_per_hop("critic")


def dtype_per_hop_ref():
    return dtype_per_hop("ref")


def trajectory(dtype: str, **engine):
    """Return the weights' sum and the grad norms after three steps, to compare two trees."""
    worker = make_worker(dtype=dtype, grad_scaler=settings(init_scale=1024.0), **engine)
    norms = [metrics_of(worker.train_batch(batch(seed)))["grad_norm"] for seed in range(3)]
    return {
        "norms": norms,
        "sum": sum(t.double().sum().item() for t in state(worker)),
        "lr": worker.engine.optimizer.param_groups[0]["lr"],
    }


def trajectory_bf16():
    return trajectory("bfloat16")


def trajectory_fp32():
    return trajectory("float32")


def trajectory_fp16():
    return trajectory("float16")


def trajectory_fp16_fused():
    try:
        return trajectory("float16", optimizer={"fused": True})
    except RuntimeError as error:  # on every rank alike
        return {"error": str(error)}


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
