"""The replay buffer of verl's v1 trainers, for steps that last a few seconds: ``trainer.v1.sampler.custom_sampler``."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

POLL_S = 0.1


def quick_replay_buffer(trainer_mode: str, **kwargs: Any) -> ReplayBuffer:
    """Return the buffer that verl takes in this mode, polling every 0.1 s; verl's 2 s would round up each generation.

    Args:
        trainer_mode: ``trainer.v1.trainer_mode``; an asynchronous trainer also takes answers of earlier weights.
    """
    buffer = ReplayBuffer if trainer_mode == "sync" else ReplayBufferAsync
    return buffer(trainer_mode=trainer_mode, poll_interval=POLL_S, **kwargs)
