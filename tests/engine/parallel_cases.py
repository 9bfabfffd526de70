"""Cases of verl's FSDP engine: layouts that must not change what is computed, and three ranks."""

import torch
from fsdp_worker import POISONED, RANK, STRATEGY, batch, make_worker, metrics_of, poison_gradient, same, settings, state

from verl.utils.fsdp_utils import offload_fsdp_model_to_cpu, offload_fsdp_optimizer

PACKED = {"override_config": {"attn_implementation": "packed"}, "use_remove_padding": True}  # recipes/cpu/host.py
OFFLOADED = {"param_offload": True, "optimizer_offload": True}
FUSED = {"optimizer": {"fused": True}}
LAYOUTS = {
    "plain": {},
    "fused": FUSED,
    "packed": {"model": PACKED},
    "Ulysses": {"model": PACKED, "ulysses_sequence_parallel_size": 2},
    "dynamic": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 20},
    "offloaded": OFFLOADED,
    "offloaded, fused": OFFLOADED | FUSED,
}
if STRATEGY == "fsdp2":
    LAYOUTS["offload_policy"] = {"offload_policy": True}
    LAYOUTS["offload_policy, fused"] = {"offload_policy": True} | FUSED
STEPS, OVERFLOW = 4, 2
METRICS = ("loss", "grad_norm", "loss_scale", "skipped_steps")


def inner_loss(model_output, data, dp_group=None):
    """``token_loss`` without each row's last label, which is the first token of the next row of the micro-batch."""
    rows = torch.stack([row[:-1].float().sum() for row in model_output["log_probs"].unbind()])
    return -(rows * data["weight"]).sum() / data["batch_num_tokens"] * data["dp_size"], {}


def train(dtype="float16", rows=6, rank=0, poisoned=POISONED, **config) -> tuple[dict, list[torch.Tensor]]:
    """Train on the rows of ``rank``; rank ``poisoned`` overflows in one step. Return metrics by step, and the state.

    Under Ulysses, only the first rank of a group reports metrics.
    """
    scaler = settings(init_scale=1024.0, growth_interval=2)
    worker = make_worker(dtype=dtype, grad_scaler=scaler, warmup=50, **config)
    worker.set_loss_fn(inner_loss)
    reported = {name: [] for name in METRICS}
    for step in range(STEPS):
        before = state(worker)
        if step == OVERFLOW:
            poison_gradient(worker, ranks=(poisoned,))
        output = worker.train_batch(batch(step, size=rows, rank=rank))
        if "param_offload" in config:  # the engine does it only where the device's name differs from the host's
            offload_fsdp_model_to_cpu(worker.engine.module)
            offload_fsdp_optimizer(worker.engine.optimizer)
        for name in METRICS if output is not None else ():
            reported[name].append(metrics_of(output).get(name))
        if step == OVERFLOW:
            reported["skipped_to_the_bit"] = same(before, state(worker))
    return reported, state(worker)


def layouts():
    """Train the same rows on two ranks in each layout; return the metrics, and whether the state is the plain one's.

    The state of a fused optimizer is compared with that of another one.
    """
    outcomes = {name: train(**config) for name, config in LAYOUTS.items()}
    for name, (reported, final) in outcomes.items():
        reported["same_state"] = same(final, outcomes["fused" if "fused" in name else "plain"][1])
    return {name: reported for name, (reported, _) in outcomes.items()}


def three_ranks():
    """Train on shards of different sizes where the second of three ranks overflows: equal rows, and different ones."""
    uneven = {"rows": 6 - RANK, "rank": RANK, "use_dynamic_bsz": True, "max_token_len_per_gpu": 20}
    return {
        "float16": train(poisoned=1)[0],
        "float32": train(dtype="float32", poisoned=1)[0],
        "uneven": train(poisoned=1, **uneven)[0],
        "elements": sum(tensor.numel() for tensor in train(poisoned=1)[1]),
    }


CASES = {"layouts": layouts, "three_ranks": three_ranks}
