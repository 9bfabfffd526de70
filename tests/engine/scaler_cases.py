"""Cases of verl's FSDP engine: overflows, the loss scale, skipped steps, storms, and the cost of a step."""

import itertools
import math
import warnings

import torch
from fsdp_worker import (
    PATCHED,
    RANK,
    batch,
    gradients_after_step,
    lr_of,
    make_worker,
    metrics_of,
    poison_gradient,
    poison_micro_batch,
    same,
    scale_of,
    settings,
    state,
    token_loss,
    upstream_scaler_defaults,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.profiler import ProfilerActivity, profile

from verl.utils import tensordict_utils as tu


def faults(role: str, adam: str):
    """Overflow one weight of rank 1 in the backward pass of one micro-batch of three: the first, the middle, the last.

    Return whether the step is skipped to the bit, the metrics, and whether the next step is that of a worker without
    the overflow. ``adam`` is torch's implementation: "foreach" or "fused".
    """

    def make():
        torch.manual_seed(0)  # initializes the critic's head
        return make_worker(role, grad_scaler=settings(init_scale=1024.0), optimizer={adam: True}, warmup=50)

    worker, spared = make(), make()
    for one in (worker, spared):  # initializes Adam's state
        one.train_batch(batch(0, size=6))
    outcomes = {}
    for seed, (value, micro_batch) in enumerate(((v, m) for v in (math.inf, math.nan) for m in range(3)), start=1):
        before, lr_before, scale_before = state(worker), lr_of(worker), scale_of(worker)
        poison_micro_batch(worker, micro_batch, value)
        left = gradients_after_step(worker)
        metrics = metrics_of(worker.train_batch(batch(-seed, size=6)))
        outcome = {
            "unchanged": same(before, state(worker)),
            "gradients_cleared": left == [0],
            "scale_factor": scale_of(worker) / scale_before,
            "metrics": {k: metrics.get(k) for k in ("grad_norm", "skipped_steps", "loss_scale")},
            "lr_unchanged": lr_of(worker) == lr_before,
        }
        spared.engine.scaler.load_state_dict(worker.engine.scaler.state_dict())
        norms = [metrics_of(one.train_batch(batch(seed, size=6)))["grad_norm"] for one in (worker, spared)]
        outcome["next_step"] = norms[0] == norms[1] and same(state(worker), state(spared))
        outcome["moves_on"] = not same(before, state(worker))
        outcomes[f"{value}, micro-batch {micro_batch}"] = outcome
    return outcomes


def faults_actor():
    return faults("actor", "foreach")


def faults_critic():
    return faults("critic", "foreach")


def faults_actor_fused():
    return faults("actor", "fused")


def faults_critic_fused():
    return faults("critic", "fused")


def overflow_on_all_ranks(adam: str):
    """Overflow on both ranks, as after a loss that overflowed: torch's count of ranks is then 2."""
    worker = make_worker(grad_scaler=settings(init_scale=1024.0), optimizer={adam: True})
    worker.train_batch(batch(0))
    before, scale_before = state(worker), scale_of(worker)
    poison_gradient(worker, math.inf, rank=RANK)
    worker.train_batch(batch(1))
    return {
        "unchanged": same(before, state(worker)),
        "finite": all(bool(t.isfinite().all()) for t in state(worker)),
        "scale_factor": scale_of(worker) / scale_before,
    }


def overflow_on_all_ranks_foreach():
    return overflow_on_all_ranks("foreach")


def overflow_on_all_ranks_fused():
    return overflow_on_all_ranks("fused")


def nan_loss():
    """Return a NaN for the loss of one of rank 1's two micro-batches: what the step changes, and its metrics."""
    worker = make_worker(grad_scaler=settings(init_scale=1024.0))
    worker.train_batch(batch(0))
    before, micro_batch = state(worker), itertools.count()

    def spoilt(model_output, data, dp_group=None):
        loss, metrics = token_loss(model_output, data, dp_group)
        return (loss * math.nan if RANK == 1 and next(micro_batch) == 0 else loss), metrics

    worker.set_loss_fn(spoilt)
    metrics = metrics_of(worker.train_batch(batch(1)))
    return {
        "unchanged": same(before, state(worker)),
        "metrics": {key: metrics.get(key) for key in ("grad_norm", "skipped_steps", "loss_scale")},
    }


def torchs_sequence():
    """Take fused steps by unscale_, step and update: without an overflow, with one on rank 1, with one on both ranks.

    torch adds up found_inf over the ranks; its fused optimizers skip at exactly 1.
    """
    from verl.utils.precision import LossScaler

    torch.manual_seed(0)
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    scaler = LossScaler(settings(init_scale=1024.0), device="cpu")
    steps = []
    for overflows in (False, RANK == 1, True):
        before = [parameter.detach().clone() for parameter in module.parameters()]
        scaler.scale(module(torch.ones(2)).sum() * (math.inf if overflows else 1.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append([same(before, list(module.parameters())), scaler.skipped, scaler.get_scale()])
    return steps


def growth():
    """Return the scale after each of seven steps, of which the fourth overflows; ``growth_interval`` is 2."""
    worker = make_worker(grad_scaler=settings(init_scale=1024.0, growth_interval=2))
    scales = []
    for step in range(1, 8):
        if step == 4:
            poison_gradient(worker, math.inf)
        worker.train_batch(batch(step))
        scales.append(scale_of(worker))
    return scales


def partly_skipped_update():
    """Overflow in the first of two mini-batches of an update: LR and metrics."""
    worker = make_worker(grad_scaler=settings(init_scale=1024.0))
    data = batch(1, size=8)
    tu.assign_non_tensor(data, mini_batch_size=8, epochs=1, seed=1, dataloader_kwargs={"shuffle": False})
    lr_before = worker.engine.optimizer.param_groups[0]["lr"]
    poison_gradient(worker, float("inf"))
    metrics = metrics_of(worker.train_mini_batch(data))
    return {k: metrics.get(k) for k in ("grad_norm", "skipped_steps", "loss_scale")} | {
        "lr_advanced": worker.engine.optimizer.param_groups[0]["lr"] != lr_before
    }


def storm(value=float("inf")):
    """Overflow the last gradient of rank 1 in every step: scales, skips and the error that ends the run."""
    worker = make_worker(grad_scaler=settings(init_scale=8.0, min_scale=2.0, max_consecutive_skips=4))
    scales, skips = [], []
    try:
        for seed in range(8):
            poison_gradient(worker, value, which=-1)
            skips.append(metrics_of(worker.train_batch(batch(seed))).get("skipped_steps"))
            scales.append(scale_of(worker))
    except RuntimeError as error:
        return {"scales": scales, "skips": skips, "error": str(error), "type": type(error).__name__}
    return {"scales": scales, "error": None}


def storm_nan():
    return storm(float("nan"))


def cost_of_a_step():
    """Count an optimizer step's all-reduces and device reads by the host, step counters excluded."""

    def cost(**overrides):
        worker = make_worker(grad_scaler=settings(init_scale=1024.0), **overrides)
        worker.train_batch(batch(1))  # the first step initializes Adam's state
        step, profiler = worker.engine.optimizer_step, profile(activities=[ProfilerActivity.CPU])

        def profiled():
            with profiler:
                return step()

        worker.engine.optimizer_step = profiled
        worker.train_batch(batch(2))
        outside = [e for e in profiler.events() if not any("Optimizer.step" in parent for parent in ancestry(e))]
        names = [event.name for event in outside]
        return {"all_reduces": names.count("gloo:all_reduce"), "host_reads": names.count("aten::_local_scalar_dense")}

    def ancestry(event):
        return [event.name, *(ancestry(event.cpu_parent) if event.cpu_parent else [])]

    costs = {"bf16": cost(dtype="bfloat16"), "fp16": cost()}
    return costs | ({"fp16_fused": cost(optimizer={"fused": True})} if PATCHED else {})


def replicated():
    """Train two replicas of two shards each (HSDP); return their norm, and the skip after an overflow on one rank."""
    sharded = metrics_of(make_worker(grad_scaler=settings(init_scale=1024.0)).train_batch(batch(1)))["grad_norm"]
    worker = make_worker(fsdp_size=2, grad_scaler=settings(init_scale=1024.0))
    result = {"sharded": sharded, "replicated": metrics_of(worker.train_batch(batch(1)))["grad_norm"]}
    before = state(worker)
    poison_gradient(worker, float("inf"))
    metrics = metrics_of(worker.train_batch(batch(2)))
    return result | {"unchanged": same(before, state(worker)), "skipped": metrics.get("skipped_steps")}


def scaler_device():
    """Return whether the scaler of a CPU worker is enabled and skips; upstream's default device is "cuda"."""
    defaults = ShardedGradScaler.__init__.__defaults__
    ShardedGradScaler.__init__.__defaults__ = upstream_scaler_defaults
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        worker = make_worker()
    ShardedGradScaler.__init__.__defaults__ = defaults
    poison_gradient(worker, float("inf"))
    worker.train_batch(batch(1))
    return {
        "enabled": worker.engine.scaler.is_enabled(),
        "weights_finite": all(bool(t.isfinite().all()) for t in state(worker)),
    }
