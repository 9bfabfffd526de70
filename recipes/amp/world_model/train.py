"""Run the recipe: collect trajectories, train on them, evaluate each epoch, write the results."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from recipes.amp.options import device, finite, new_folder
from recipes.amp.trainer import FP16Trainer
from recipes.amp.world_model.config import WorldModelConfig
from recipes.amp.world_model.figure import plot_predictions
from recipes.amp.world_model.model import WorldModel
from recipes.amp.world_model.objective import open_loop_errors, world_model_loss
from recipes.amp.world_model.trajectories import Trajectories, collect


def train(
    config: WorldModelConfig, data: Trajectories, held_out: Trajectories
) -> tuple[FP16Trainer, Iterable[dict[str, Any]]]:
    """Return a trainer, and an iterator that trains it and yields a row of metrics an epoch.

    The errors on the held-out data are computed in the trainer's dtype too.
    """
    torch.manual_seed(config.seed)
    model = WorldModel(data.observations.shape[-1], data.actions.shape[-1], config.hidden, config.latent)
    model.set_statistics(data)
    target, _ = device(config.device)
    model.to(target)
    data, held_out = data.to(target), held_out.to(target)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    trainer = FP16Trainer(model, optimizer, config.trainer)
    order = torch.Generator().manual_seed(config.seed)

    def epochs() -> Iterable[dict[str, Any]]:
        for epoch in range(1, config.epochs + 1):
            began, before = time.perf_counter(), trainer.overflow_steps
            for group in optimizer.param_groups:
                group["lr"] = config.lr * (1 - (epoch - 1) / config.epochs)
            losses = [
                trainer.training_step(
                    data.at(rows.to(target)), lambda model, batch: world_model_loss(model, batch, config.context)
                )
                for rows in torch.randperm(len(data.rewards), generator=order).split(config.batch_size)
            ]
            with trainer.autocast():
                errors = open_loop_errors(model, held_out, config.context)
            stats = trainer.get_stats()
            yield {
                "epoch": epoch,
                "train_loss": torch.stack(losses).mean().item(),
                **{f"error/{name}": value for name, value in errors.items()},
                "overflow_steps": trainer.overflow_steps - before,
                "training_steps": stats["training_steps"],
                "loss_scale": stats["current_scale"],
                "effective_dtype": stats["effective_dtype"],
                "effective_dtype_share": stats["effective_dtype_share"],
                "seconds": round(time.perf_counter() - began, 3),
            }

    return trainer, epochs()


def run(config: WorldModelConfig) -> list[dict[str, Any]]:
    """Collect, train, evaluate and plot; everything goes to ``config.out``.

    Returns:
        the rows of metrics.jsonl, one an epoch.

    Raises:
        ValueError: an environment that cannot be learned from, a folder with results.
        LossScaleError, FloatingPointError: as the trainer's.
    """
    held_out = collect(config.env, config.held_out_steps, config.seed + 1, config.length)
    if not held_out.valid[:, config.context :].any():
        longest = int(held_out.valid.sum(1).max())
        raise ValueError(f"context={config.context} must be below {longest}, the longest held-out trajectory")
    out = new_folder(config.out)
    data = collect(config.env, config.steps, config.seed, config.length)
    trainer, epochs = train(config, data, held_out)
    print(f"{int(data.valid.sum())} steps in {len(data.valid)} trajectories of {config.env}", flush=True)
    rows = []
    with (out / "metrics.jsonl").open("w") as file:
        for row in epochs:
            rows.append(row)
            file.write(json.dumps(finite(row), allow_nan=False) + "\n")
            file.flush()
            print(
                f"epoch {row['epoch']}/{config.epochs} loss {row['train_loss']:.4f} open-loop error "
                f"{row['error/model']:.3f} (mean {row['error/mean']:.3f}, last value {row['error/last_value']:.3f}) "
                f"overflows {row['overflow_steps']} scale {row['loss_scale']:g} {row['effective_dtype']} "
                f"{row['seconds']:.1f} s",
                flush=True,
            )
    model = trainer.module
    trainer.save_checkpoint(out / "checkpoint.pt", {"config": asdict(config), "sizes": model.sizes})
    title = f"{config.env}, trained in {rows[-1]['effective_dtype']}, {config.context} observations given"
    plot_predictions(model.cpu(), held_out, config.context, rows, title, out / "predictions.png")
    print(f"{out / 'metrics.jsonl'}, {out / 'predictions.png'}, {out / 'checkpoint.pt'}")
    return rows
