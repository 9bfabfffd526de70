"""Cases of verl's FSDP engine and trainers: the files that a save leaves and the state that a resume restores."""

import json
import warnings
from pathlib import Path

import save_moments
import torch
import torch.distributed as dist
from fsdp_worker import (
    RANK,
    batch,
    composed,
    make_worker,
    metrics_of,
    poison_gradient,
    same,
    scale_of,
    settings,
    shared_directory,
    state,
)
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import create_rl_sampler
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.checkpoint import CheckpointHandler


def checkpoint():
    """Save after two overflows and a clean step, load into a fresh worker: weights, Adam, LR, scale, next step."""
    directory = shared_directory()
    worker = make_worker()
    for seed in (1, 2):
        poison_gradient(worker, float("inf"))
        worker.train_batch(batch(seed))
    worker.train_batch(batch(3))
    saved, scale, lr = state(worker), scale_of(worker), worker.engine.optimizer.param_groups[0]["lr"]
    tracker = worker.engine.scaler._get_growth_tracker()
    worker.save_checkpoint(directory, global_step=1)
    fresh = make_worker()
    fresh.load_checkpoint(directory)
    config = json.loads((Path(directory) / "fsdp_config.json").read_text())
    result = {
        "state": same(saved, state(fresh)),
        "scale": [scale, scale_of(fresh)],
        "tracker": [tracker, fresh.engine.scaler._get_growth_tracker()],
        "lr": [lr, fresh.engine.optimizer.param_groups[0]["lr"]],
        "recorded_dtype": config.get("dtype"),
    }
    # The next step equals that of the uninterrupted worker.
    worker.train_batch(batch(4))
    fresh.train_batch(batch(4))
    result["next_step"] = same(state(worker), state(fresh))

    extra = Path(directory) / f"extra_state_world_size_{dist.get_world_size()}_rank_{RANK}.pt"
    old = torch.load(extra, weights_only=False)
    old.pop("grad_scaler", None)
    torch.save(old, extra)
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_worker().load_checkpoint(directory)
    result["old_checkpoint_warnings"] = [str(w.message) for w in caught if "loss scale" in str(w.message)]
    return result


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
    for seed in range(2, 10):  # the pristine tree starts at a scale at which the first steps overflow
        fresh.train_batch(batch(seed))
    moved = state(fresh)
    result["trains"] = not same(saved, moved) and all(bool(t.isfinite().all()) for t in moved)
    return result


def bf16_to_fp16():
    return regime_change("bfloat16", "float16")


def fp16_to_bf16():
    return regime_change("float16", "bfloat16")


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
    good, lr, outcome = state(worker), worker.engine.optimizer.param_groups[0]["lr"], None
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
        "lr_unchanged": fresh.engine.optimizer.param_groups[0]["lr"] == lr,
        "scale": scale_of(fresh),
        "warnings": [str(w.message) for w in caught if "loss scale" in str(w.message)],
        "next_step": metrics_of(fresh.train_batch(batch(5))).get("grad_norm"),
    }


KEPT = {  # of actor and critic
    "all": "trainer.max_actor_ckpt_to_keep=null trainer.max_critic_ckpt_to_keep=null",
    "one": "trainer.max_actor_ckpt_to_keep=1 trainer.max_critic_ckpt_to_keep=1",
    "two": "trainer.max_actor_ckpt_to_keep=2 trainer.max_critic_ckpt_to_keep=2",
    "three": "trainer.max_actor_ckpt_to_keep=3 trainer.max_critic_ckpt_to_keep=3",
    "one and three": "trainer.max_actor_ckpt_to_keep=1 trainer.max_critic_ckpt_to_keep=3",
    "one, async": "+trainer.remove_previous_ckpt_in_save=true actor_rollout_ref.actor.checkpoint.async_save=true",
}


def kept_ppo(trainer_class):
    """Watch the checkpoints that a PPO trainer's saves leave on rank 0, the only rank that removes any."""
    workers = {"actor_rollout_wg": make_worker(), "critic_wg": make_worker("critic")}
    result = {}
    for name, overrides in KEPT.items():
        root = Path(shared_directory()) / str(RANK)
        trainer = trainer_class.__new__(trainer_class)
        trainer.config = composed(f"trainer.default_local_dir={root}", *overrides.split())
        trainer.use_critic, trainer.trainer_mode = True, "sync"
        trainer.checkpoint_callback = build_checkpoint_callback(trainer.config)
        trainer.train_dataloader = StatefulDataLoader(list(range(6)), batch_size=2)
        for attribute, worker in workers.items():
            setattr(trainer, attribute, worker)

        def save(step, trainer=trainer):
            trainer.global_steps = step
            trainer._save_checkpoint()

        result[name] = save_moments.watch(save, root, watched=RANK == 0)
    return result if RANK == 0 else None


def kept_v1():
    return kept_ppo(PPOTrainerSync)


def kept_legacy():
    return kept_ppo(RayPPOTrainer)


def kept_sft():
    """Watch the checkpoints that the SFT trainers' handler leaves, as ``kept_ppo``."""
    worker, result = make_worker(), {}
    for name, keep in {"all": None, "one": 1, "two": 2, "three": 3}.items():
        root = Path(shared_directory())
        loader = StatefulDataLoader(list(range(6)), batch_size=2)
        handler = CheckpointHandler(worker.engine, loader, default_local_dir=str(root), max_ckpt_to_keep=keep)
        result[name] = save_moments.watch(handler.save_checkpoint, root, watched=RANK == 0)
    return result if RANK == 0 else None


def sft_checkpoints():
    """Save an epoch of three steps by the SFT trainers' handler; resume, also where the newest checkpoint is torn."""
    directory = shared_directory()
    worker = make_worker()

    def handler():
        sampler = DistributedSampler(list(range(6)), num_replicas=1, rank=0)
        loader = StatefulDataLoader(sampler.dataset, batch_size=2, sampler=sampler)
        return CheckpointHandler(worker.engine, loader, default_local_dir=directory)

    def epoch(loader, number: int) -> list:
        loader.sampler.set_epoch(number)
        return [rows.tolist() for rows in loader]

    first = handler()
    for step, _ in enumerate(first.train_dataloader, 1):
        worker.train_batch(batch(step))
        first.save_checkpoint(step)
        if step == 2:
            saved = state(worker)
    resumed, expected = handler(), epoch(first.train_dataloader, 1)
    result = {"resumed": resumed.load_checkpoint(), "data": epoch(resumed.train_dataloader, 1) == expected}
    dist.barrier()
    if RANK == 0:
        (Path(directory) / "global_step_3" / "data_1.pt").unlink()
    dist.barrier()
    return result | {"resumed_of_torn": handler().load_checkpoint(), "state": same(saved, state(worker))}


def ppo_checkpoints(trainer_class):
    """Test a PPO trainer's own methods as ``sft_checkpoints``; each rank is a driver with its own folder."""
    directory = Path(shared_directory()) / str(RANK)
    worker = make_worker()

    def trainer(*overrides):
        made = trainer_class.__new__(trainer_class)
        made.config = composed(f"trainer.default_local_dir={directory}", *overrides)
        made.global_steps = 0
        made.use_critic, made.trainer_mode, made.actor_rollout_wg = False, "sync", worker
        made.checkpoint_callback = build_checkpoint_callback(made.config)
        sampler = create_rl_sampler(made.config.data, list(range(6)))
        made.train_dataloader = StatefulDataLoader(list(range(6)), batch_size=2, sampler=sampler)
        return made

    def next_epoch(made) -> list:
        """Return the trainer's next batches; v1 starts a new epoch if the saved one is exhausted."""
        passes = 2 if trainer_class is PPOTrainerSync else 1
        return next(filter(None, ([rows.tolist() for rows in made.train_dataloader] for _ in range(passes))), [])

    first = trainer()
    for step, _ in enumerate(first.train_dataloader, 1):
        worker.train_batch(batch(step))
        first.global_steps = step
        first._save_checkpoint()
        if step == 2:
            saved = state(worker)
    resumed, expected = trainer(), next_epoch(first)
    resumed._load_checkpoint()
    result = {"resumed": resumed.global_steps, "data": next_epoch(resumed) == expected}
    (directory / "global_step_3" / "data.pt").unlink()
    torn = trainer()
    torn._load_checkpoint()
    result |= {"resumed_of_torn": torn.global_steps, "state": same(saved, state(worker))}

    def resumed_by_path(step: int) -> int | str:
        made = trainer("trainer.resume_mode=resume_path", f"trainer.resume_from_path={directory}/global_step_{step}")
        try:
            made._load_checkpoint()
        except RuntimeError as error:
            return type(error).__name__
        return made.global_steps

    result |= {"torn_by_path": resumed_by_path(3)}
    (directory / "latest_checkpointed_iteration.txt").write_text("9")
    for manifest in directory.glob("*/manifest.json"):
        manifest.unlink()
    lost = trainer()
    try:
        lost._load_checkpoint()
        result["resumed_of_lost"] = lost.global_steps
    except RuntimeError as error:
        result["resumed_of_lost"] = type(error).__name__
    return result | {"resumed_by_path": resumed_by_path(1)}


def ppo_checkpoints_v1():
    return ppo_checkpoints(PPOTrainerSync)


def ppo_checkpoints_legacy():
    return ppo_checkpoints(RayPPOTrainer)
