"""Train a member of the population on trajectories, and mutate it."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from recipes.amp.evolution.config import EvolutionConfig
from recipes.amp.evolution.trajectory import Policy, Trajectory
from recipes.amp.trainer import FP16Trainer

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Member:
    """An agent: its policy's weights, the checkpoint from which its training continues, and its first generation."""

    weights: Weights
    checkpoint: Optional[bytes] = None
    born: int = 0


def learn(
    config: EvolutionConfig, device: torch.device, policy: Policy, member: Member, pool: Sequence[Trajectory], seed: int
) -> tuple[Member, dict[str, Any]]:
    """Clone a sample of the pool, drawn with replacement, each step weighted by exp(return of its trajectory).

    Returns:
        the member after it, and its trainer's statistics in this generation.
    """
    policy.load_state_dict(member.weights)
    policy.to(device)
    trainer = FP16Trainer(policy, torch.optim.Adam(policy.parameters(), lr=config.lr), config.trainer)
    rng, order = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "member.pt"
        if member.checkpoint is not None:
            file.write_bytes(member.checkpoint)
            trainer.load_checkpoint(file)
        drawn = [pool[index] for index in rng.integers(len(pool), size=len(pool))]
        returns = np.array([each.total for each in pool])
        scale = config.temperature * (returns.std() + 1e-6)
        worth = np.exp([(each.total - returns.max()) / scale for each in drawn])
        lengths = [len(each.actions) for each in drawn]
        data = [
            torch.from_numpy(values).to(device)
            for values in (
                np.concatenate([each.observations for each in drawn]),
                np.concatenate([each.actions for each in drawn]),
                np.repeat(worth / np.average(worth, weights=lengths), lengths).astype(np.float32),
            )
        ]
        overflows_before, losses = trainer.overflow_steps, []
        for _ in range(config.epochs):
            for rows in torch.randperm(sum(lengths), generator=order).split(config.batch_size):
                batch = [values[rows.to(device)] for values in data]
                losses.append(trainer.training_step(batch, cloning_loss))
        trainer.save_checkpoint(file, {"config": asdict(config)})
        stats = trainer.get_stats()
        learned = {
            "loss": torch.stack(losses).mean().item(),
            "training_steps": stats["training_steps"],
            "overflow_steps": trainer.overflow_steps - overflows_before,
            "loss_scale": stats["current_scale"],
            "effective_dtype": stats["effective_dtype"],
            "fallback": stats["fallback"],
        }
        weights = {name: value.cpu() for name, value in policy.state_dict().items()}
        return Member(weights, file.read_bytes(), member.born), learned


def cloning_loss(policy: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the weighted cross entropy of the actions taken, 0-d, in fp32; batch: (B, O), (B,), (B,)."""
    observations, actions, weights = batch
    losses = F.cross_entropy(policy(observations).float(), actions, reduction="none")
    return (losses * weights).mean()


def mutated(member: Member, size: float, seed: int, born: int) -> Member:
    """Return a copy with noise on its weights, which begins to train anew.

    Args:
        size: of the noise, in standard deviations of each weight tensor.
        born: the copy's first generation.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: value + size * value.std(correction=0) * torch.randn(value.shape, generator=generator)
        for name, value in member.weights.items()
    }
    return Member(weights, born=born)
