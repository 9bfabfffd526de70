"""The replay buffer of verl's trainer, for steps that last a few seconds: ``trainer.v1.sampler.custom_sampler``."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class QuickReplayBuffer(ReplayBuffer):
    """Polls for finished rollouts every 0.1 s; verl's 2 s would round up the time of each generation."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs, poll_interval=0.1)
