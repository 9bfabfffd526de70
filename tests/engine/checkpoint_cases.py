"""Cases of verl's FSDP engine: what its checkpoints contain, and the state that a resume restores."""

import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp_worker import (
    RANK,
    batch,
    lr_of,
    make_worker,
    metrics_of,
    poison_gradient,
    same,
    scale_of,
    settings,
    shared_directory,
    state,
)


def scales_of_two_roles():
    """Save an actor and a critic of one process; return the loss scale in the checkpoint of each."""
    scales = {"actor": 1024.0, "critic": 4096.0}
    workers = {role: make_worker(role, grad_scaler=settings(init_scale=scale)) for role, scale in scales.items()}
    for role, worker in workers.items():
        directory = shared_directory()
        worker.save_checkpoint(directory, global_step=1)
        extra = torch.load(Path(directory) / f"extra_state_world_size_2_rank_{RANK}.pt", weights_only=False)
        scales[role] = extra["grad_scaler"]["scale"]
    return scales


def regime_change(saved_in: str, resumed_in: str):
    """Save in one dtype, resume in another, take steps: warnings, weights and Adam state."""
    directory = shared_directory()
    worker = make_worker(dtype=saved_in, grad_scaler=settings(init_scale=1024.0))
    worker.train_batch(batch(1))
    saved = state(worker)
    worker.save_checkpoint(directory, global_step=1)
    fresh = make_worker(dtype=resumed_in, grad_scaler=settings(init_scale=1024.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fresh.load_checkpoint(directory)
    result = {
        "warnings": [str(w.message) for w in caught if "loss scale" in str(w.message)],
        "state": same(saved, state(fresh)),
    }
    for seed in (2, 3):  # the first of the warm-up has a learning rate of 0
        fresh.train_batch(batch(seed))
    moved = state(fresh)
    result["trains"] = not same(saved, moved) and all(bool(t.isfinite().all()) for t in moved)
    return result


def foreign_checkpoints():
    """Load a scaler state of another shape, and the shards of another number of workers; return the errors."""
    directory = shared_directory()
    worker = make_worker()
    worker.save_checkpoint(directory, global_step=1)
    extra = Path(directory) / f"extra_state_world_size_{dist.get_world_size()}_rank_{RANK}.pt"
    content = torch.load(extra, weights_only=False)
    torch.save(content | {"grad_scaler": {"scale": 1024.0, "hysteresis": 2}}, extra)

    def refusal():
        try:
            worker.load_checkpoint(directory)
        except Exception as error:
            return {"type": type(error).__name__, "message": str(error)}

    result = {"scaler": refusal(), "extra": str(extra), "directory": directory}
    dist.barrier()
    for shard in Path(directory).glob(f"*_rank_{RANK}.pt"):
        shard.rename(str(shard).replace("world_size_2", "world_size_4"))
    dist.barrier()
    result["world_size"] = refusal()
    return result


def storm_checkpoint():
    """Save a worker that offloads after its storm, and resume: weights, LR, scale, next step."""
    directory = shared_directory()
    scaler = settings(init_scale=8.0, min_scale=2.0, max_consecutive_skips=2)
    worker = make_worker(grad_scaler=scaler, param_offload=True, optimizer_offload=True)
    for seed in (1, 2):  # the first of the warm-up has a learning rate of 0
        worker.train_batch(batch(seed))
    good, lr, outcome = state(worker), lr_of(worker), None
    try:
        for seed in range(4):
            poison_gradient(worker, float("nan"))
            worker.train_batch(batch(seed))
    except RuntimeError as error:
        outcome = type(error).__name__
    worker.save_checkpoint(directory, global_step=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fresh = make_worker(grad_scaler=settings(init_scale=64.0))
        fresh.load_checkpoint(directory)
    return {
        "outcome": outcome,
        "good": same(good, state(fresh)),
        "lr_unchanged": lr_of(fresh) == lr,
        "scale": scale_of(fresh),
        "warnings": [str(w.message) for w in caught if "loss scale" in str(w.message)],
        "next_step": metrics_of(fresh.train_batch(batch(5))).get("grad_norm"),
    }


CASES = {
    "scales_of_two_roles": scales_of_two_roles,
    "bf16_to_fp16": partial(regime_change, "bfloat16", "float16"),
    "fp16_to_bf16": partial(regime_change, "float16", "bfloat16"),
    "foreign_checkpoints": foreign_checkpoints,
    "storm_checkpoint": storm_checkpoint,
}
