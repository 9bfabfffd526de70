"""A small network, its data and its trainer, and the comparison of states: shared by the tests of recipes/amp."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from recipes.amp.trainer import FP16Trainer, FP16TrainingConfig

INF = float("inf")
DTYPES = ("float16", "bfloat16", "float32")
ADAMW_KINDS = ("loop", "foreach", "fused")


def network(seed: int = 0, hidden: int = 16) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))


def batches(count: int, seed: int = 1) -> list[torch.Tensor]:
    return list(torch.randn(count, 8, 6, generator=torch.Generator().manual_seed(seed)))


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()


def trainer(
    model: torch.nn.Module | None = None,
    make: Callable[..., torch.optim.Optimizer] | str = "loop",
    lr: float = 1e-2,
    **config: Any,
) -> FP16Trainer:
    """Return a trainer that computes in 16 bits on the CPU, from a scale at which these losses do not overflow.

    ``make`` makes the optimizer, or is the implementation of AdamW, one of ``ADAMW_KINDS``.
    """
    model = network() if model is None else model
    implementation = {make: True} if make in ("foreach", "fused") else {}
    optimizer = (torch.optim.AdamW if isinstance(make, str) else make)(model.parameters(), lr=lr, **implementation)
    return FP16Trainer(model, optimizer, FP16TrainingConfig(**{"on_cpu": True, "loss_scale": 1024.0} | config))


def train(trained: FP16Trainer, data: Iterable[torch.Tensor]) -> list[float]:
    """Train on each batch, and return the losses."""
    return [trained.training_step(batch, loss_of).item() for batch in data]


def snapshot(of: FP16Trainer) -> dict[str, Any]:
    """Return a copy of all that a checkpoint restores; ``trained`` is the model's and the optimizer's state."""
    state = {"trained": (of.module.state_dict(), of.optimizer.state_dict())}
    state["counters"] = (of.training_steps, of.overflow_steps, of.consecutive_skips)
    state["scaler"] = of.scaler.state_dict() if of.scaler is not None else None
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)


def same_bits(one: Any, other: Any) -> bool:
    """Return whether two nests of tensors and plain values are bitwise equal."""
    (leaves, tree), (others, other_tree) = tree_flatten(one), tree_flatten(other)
    equal = lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    return tree == other_tree and all(equal(a, b) for a, b in zip(leaves, others, strict=True))


def edited(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Return what writes a checkpoint again after ``change``."""

    def write(path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        change(saved)
        torch.save(saved, path)

    return write
