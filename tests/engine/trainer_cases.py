"""Cases of verl's trainers: the checkpoints that their saves leave, and the one from which they resume."""

from functools import partial
from pathlib import Path

import save_moments
import torch.distributed as dist
from fsdp_worker import RANK, batch, composed, make_worker, same, shared_directory, state
from omegaconf import OmegaConf
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import create_rl_sampler
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.checkpoint import CheckpointHandler
from verl.workers.engine_workers import TrainingWorker

ASYNC = {"trainer.remove_previous_ckpt_in_save": True, "actor_rollout_ref.actor.checkpoint.async_save": True}


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


def keep(actor: int | None, critic: int | None) -> dict[str, int | None]:
    return {"trainer.max_actor_ckpt_to_keep": actor, "trainer.max_critic_ckpt_to_keep": critic}


KEPT = {
    "one": keep(1, 1),
    "one and three": keep(1, 3),
    "one, async": keep(None, None) | ASYNC,
    "all": keep(None, None),
    "two": keep(2, 2),
    "three": keep(3, 3),
}


def kept_ppo(trainer_class, *names: str):
    """Watch the checkpoints that a PPO trainer's saves leave on rank 0, the only rank that removes any."""
    workers, result = (make_worker(), make_worker("critic")), {}
    for name in names:
        root = Path(shared_directory()) / str(RANK)
        trainer = make_trainer(trainer_class, root, *workers, **KEPT[name])

        def save(step, trainer=trainer):
            trainer.global_steps = step
            trainer._save_checkpoint()

        result[name] = save_moments.watch(save, root, watched=RANK == 0)
    return result if RANK == 0 else None


def kept_sft(*limits: int | None):
    """Watch the checkpoints that the SFT trainers' handler leaves, as ``kept_ppo``."""
    worker, result = make_worker(), {}
    for limit in limits:
        root = Path(shared_directory())
        loader = StatefulDataLoader(list(range(6)), batch_size=2)
        handler = CheckpointHandler(worker.engine, loader, default_local_dir=str(root), max_ckpt_to_keep=limit)
        result[str(limit)] = save_moments.watch(handler.save_checkpoint, root, watched=RANK == 0)
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


QUICK = ("one", "one and three", "one, async")
MORE = ("all", "one", "two", "three")
CASES = {
    "kept_v1": partial(kept_ppo, PPOTrainerSync, *QUICK),
    "kept_legacy": partial(kept_ppo, RayPPOTrainer, *QUICK),
    "kept_sft": partial(kept_sft, 1),
    "kept_more_v1": partial(kept_ppo, PPOTrainerSync, *MORE),
    "kept_more_legacy": partial(kept_ppo, RayPPOTrainer, *MORE),
    "kept_more_sft": partial(kept_sft, None, 1, 2, 3),
    "sft_checkpoints": sft_checkpoints,
    "ppo_checkpoints_v1": partial(ppo_checkpoints, PPOTrainerSync),
    "ppo_checkpoints_legacy": partial(ppo_checkpoints, RayPPOTrainer),
}
