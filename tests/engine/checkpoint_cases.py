"""Cases of verl's checkpoints: their state, which of them a save leaves, and the one from which a trainer resumes."""

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp_worker import RANK, batch, composed, make_worker, same, settings, shared_directory, state
from omegaconf import OmegaConf
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import verl
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import create_rl_sampler
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.checkpoint import CheckpointHandler
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.workers.engine_workers import TrainingWorker

VERL = Path(verl.__file__).parent
TRACED = (str(VERL / "trainer"), str(VERL / "utils/checkpoint"), shutil.__file__)
ACTOR_LIMIT, CRITIC_LIMIT = "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"
KEPT = {
    "one": {ACTOR_LIMIT: 1, CRITIC_LIMIT: 1},
    "one and three": {ACTOR_LIMIT: 1, CRITIC_LIMIT: 3},
    "one, async": {"trainer.remove_previous_ckpt_in_save": True, "actor_rollout_ref.actor.checkpoint.async_save": True},
}


def scales_of_two_roles():
    """Save an actor and a critic of one process; return the loss scale in the checkpoint of each."""
    scales = {"actor": 1024.0, "critic": 4096.0}
    workers = {role: make_worker(role, grad_scaler=settings(init_scale=scale)) for role, scale in scales.items()}
    for role, worker in workers.items():
        directory = shared_directory()
        worker.save_checkpoint(directory, global_step=1)
        file = f"extra_state_world_size_{dist.get_world_size()}_rank_{RANK}.pt"
        extra = torch.load(Path(directory) / file, weights_only=False)
        scales[role] = extra["grad_scaler"]["scale"]
    return scales


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


def make_trainer(trainer_class, folder: Path, actor: TrainingWorker, critic: TrainingWorker | None = None, **settings):
    """Return a PPO trainer with what its methods for checkpoints need, and six rows of data."""
    made = trainer_class.__new__(trainer_class)
    made.config = composed()
    for key, value in {"trainer.default_local_dir": str(folder), **settings}.items():
        OmegaConf.update(made.config, key, value, force_add=True)
    made.global_steps, made.trainer_mode = 0, "sync"
    made.use_critic, made.actor_rollout_wg, made.critic_wg = critic is not None, actor, critic
    made.checkpoint_callback = build_checkpoint_callback(made.config)
    sampler = create_rl_sampler(made.config.data, list(range(6)))
    made.train_dataloader = StatefulDataLoader(list(range(6)), batch_size=2, sampler=sampler)
    return made


def files(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of a checkpoint's files, except its manifest."""
    paths = [Path(base) / name for base, _, names in os.walk(folder) for name in names if name != "manifest.json"]
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}


def watch(save: Callable[[int], None], root: Path) -> dict:
    """Save steps 1 to 4 into ``root``; return, on rank 0, what that leaves.

    Returns:
        ``left``: after each save, the folders that contain weights, by step and role.
        ``safe``: whether verl would have resumed from a whole checkpoint before each line of its checkpoint code and of
            ``shutil`` from the second save on, the state that a process killed there leaves.
    """
    whole, left = {}, []
    before, chosen = {}, []

    def look(frame, event, _):
        nonlocal before
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        if event == "line" and whole and (now := files(root)) != before:
            before = now
            try:
                folder = Path(find_latest_ckpt_path(str(root)) or "scratch")
            except (RuntimeError, ValueError):  # upstream, on an empty tracker
                folder = Path("scratch")
            chosen.append((folder, files(folder)))
        return look

    for step in range(1, 5):
        sys.settrace(look if RANK == 0 else None)
        try:
            save(step)
        finally:
            sys.settrace(None)
        folder = root / f"global_step_{step}"
        whole[folder] = files(folder)
        shards = sorted({path.parent for path in root.rglob("model_world_size_*.pt")})
        left.append([str(path.relative_to(root)).removeprefix("global_step_") for path in shards])
    safe = all(content == whole.get(folder) for folder, content in chosen)
    return {"left": left, "safe": safe} if RANK == 0 else {}


def kept_ppo(trainer_class):
    """Watch the checkpoints that a PPO trainer's saves leave on rank 0, the only rank that removes any."""
    workers, result = (make_worker(), make_worker("critic")), {}
    for name, limits in KEPT.items():
        root = Path(shared_directory()) / str(RANK)
        trainer = make_trainer(trainer_class, root, *workers, **limits)

        def save(step, trainer=trainer):
            trainer.global_steps = step
            trainer._save_checkpoint()

        result[name] = watch(save, root)
    return result


def kept_sft():
    """Watch the checkpoints that the SFT trainers' handler leaves, as ``kept_ppo``."""
    root, loader = Path(shared_directory()), StatefulDataLoader(list(range(6)), batch_size=2)
    handler = CheckpointHandler(make_worker().engine, loader, default_local_dir=str(root), max_ckpt_to_keep=1)
    return watch(handler.save_checkpoint, root)


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
        (Path(directory) / f"global_step_3/data_{dist.get_world_size() - 1}.pt").unlink()
    dist.barrier()
    return result | {"resumed_of_torn": handler().load_checkpoint(), "state": same(saved, state(worker))}


def ppo_checkpoints(trainer_class):
    """Test a PPO trainer's own methods as ``sft_checkpoints``; each rank is a driver with its own folder."""
    directory = Path(shared_directory()) / str(RANK)
    worker = make_worker()

    make = partial(make_trainer, trainer_class, directory, worker)

    def next_epoch(trainer) -> list:
        """Return the trainer's next batches; v1 starts a new epoch if the saved one is exhausted."""
        passes = 2 if trainer_class is PPOTrainerSync else 1
        return next(filter(None, ([rows.tolist() for rows in trainer.train_dataloader] for _ in range(passes))), [])

    def resume(trainer) -> int | str:
        """Return the step that a trainer resumes from, or the type of its error."""
        try:
            trainer._load_checkpoint()
        except RuntimeError as error:
            return type(error).__name__
        return trainer.global_steps

    def resume_by_path(step: int) -> int | str:
        path = {"trainer.resume_from_path": f"{directory}/global_step_{step}"}
        return resume(make(**{"trainer.resume_mode": "resume_path"}, **path))

    first = make()
    for step, _ in enumerate(first.train_dataloader, 1):
        worker.train_batch(batch(step))
        first.global_steps = step
        first._save_checkpoint()
        if step == 2:
            saved = state(worker)
    resumed, expected = make(), next_epoch(first)
    result = {"resumed": resume(resumed), "data": next_epoch(resumed) == expected}
    (directory / "global_step_3" / "data.pt").unlink()
    result |= {"resumed_of_torn": resume(make()), "state": same(saved, state(worker))}
    result["torn_by_path"] = resume_by_path(3)
    (directory / "latest_checkpointed_iteration.txt").write_text("9")
    for manifest in directory.glob("*/manifest.json"):
        manifest.unlink()
    return result | {"resumed_of_lost": resume(make()), "resumed_by_path": resume_by_path(1)}


CASES = {
    "scales_of_two_roles": scales_of_two_roles,
    "foreign_checkpoints": foreign_checkpoints,
    "kept_v1": partial(kept_ppo, PPOTrainerSync),
    "kept_legacy": partial(kept_ppo, RayPPOTrainer),
    "kept_sft": kept_sft,
    "sft_checkpoints": sft_checkpoints,
    "ppo_checkpoints_v1": partial(ppo_checkpoints, PPOTrainerSync),
    "ppo_checkpoints_legacy": partial(ppo_checkpoints, RayPPOTrainer),
}
