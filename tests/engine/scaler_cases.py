"""Cases of verl's FSDP engine: overflows, the loss scale, skipped steps, storms, and the cost of a step."""

import math
from functools import partial

import torch
from fsdp_worker import (
    PATCHED,
    RANK,
    batch,
    gradients,
    gradients_after_step,
    lr_of,
    make_worker,
    metrics_of,
    poison_gradient,
    poison_loss,
    poison_micro_batch,
    same,
    scale_of,
    settings,
    state,
)
from torch.profiler import ProfilerActivity, profile

FAULTS = {
    "inf in the first micro-batch": partial(poison_micro_batch, which=0, value=math.inf),
    "NaN in the second micro-batch": partial(poison_micro_batch, which=1, value=math.nan),
    "inf in the last micro-batch": partial(poison_micro_batch, which=2, value=math.inf),
    # As after a loss that overflowed: torch's count of ranks with an overflow is then 2.
    "inf on both ranks": partial(poison_gradient, ranks=(0, 1)),
    "a loss of NaN": poison_loss,
}


def faults(role: str, adam: str):
    """Overflow in a step of three micro-batches, on rank 1 or on both.

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
    for seed, (name, poison) in enumerate(FAULTS.items(), start=1):
        before, lr_before, scale_before = state(worker), lr_of(worker), scale_of(worker)
        poison(worker)
        left = gradients_after_step(worker)
        metrics = metrics_of(worker.train_batch(batch(-seed, size=6)))
        outcome = {
            "unchanged": same(before, state(worker)),
            "gradients_cleared": left == [0],
            "scale_factor": scale_of(worker) / scale_before,
            "metrics": {key: metrics.get(key) for key in ("grad_norm", "skipped_steps", "loss_scale")},
            "lr_unchanged": lr_of(worker) == lr_before,
        }
        spared.engine.scaler.load_state_dict(worker.engine.scaler.state_dict())
        norms = [metrics_of(one.train_batch(batch(seed, size=6)))["grad_norm"] for one in (worker, spared)]
        outcome["next_step"] = norms[0] == norms[1] and same(state(worker), state(spared))
        outcome["moves_on"] = not same(before, state(worker))
        outcomes[name] = outcome
    return outcomes


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


def storm():
    """Overflow the last gradient of rank 1 in every step: scales, skips and the error that ends the run."""
    worker = make_worker(grad_scaler=settings(init_scale=8.0, min_scale=2.0, max_consecutive_skips=4))
    scales, skips = [], []
    try:
        for seed in range(8):
            poison_gradient(worker, of=lambda worker: gradients(worker)[-1:])
            skips.append(metrics_of(worker.train_batch(batch(seed))).get("skipped_steps"))
            scales.append(scale_of(worker))
    except RuntimeError as error:
        return {"scales": scales, "skips": skips, "error": str(error), "type": type(error).__name__}
    return {"scales": scales, "error": None}


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
    poison_gradient(worker)
    metrics = metrics_of(worker.train_batch(batch(2)))
    return result | {"unchanged": same(before, state(worker)), "skipped": metrics.get("skipped_steps")}


CASES = {
    "faults_actor": partial(faults, "actor", "foreach"),
    "faults_critic": partial(faults, "critic", "foreach"),
    "faults_actor_fused": partial(faults, "actor", "fused"),
    "faults_critic_fused": partial(faults, "critic", "fused"),
    "torchs_sequence": torchs_sequence,
    "storm": storm,
    "cost_of_a_step": cost_of_a_step,
    "replicated": replicated,
}
