"""Run the training loop in a folder: updates, records, checkpoints and the final evaluation."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from recipes.amp.ppo.algorithm import PPO
from recipes.amp.ppo.checkpoint import save_checkpoint
from recipes.amp.ppo.config import RETURN_WINDOW
from recipes.amp.ppo.provenance import provenance
from recipes.amp.ppo.telemetry import append_record, plot_curves, truncate_records

CHECKPOINT, METRICS, CURVES, EVALUATION = "checkpoint.pt", "metrics.jsonl", "curves.png", "evaluation.json"


def train(ppo: PPO, out: Path) -> None:
    """Run to the end of the config, into the folder ``out``.

    Raises:
        ResumeError: as :func:`truncate_records`.
        InvalidEnvironmentError, LossScaleError, FloatingPointError: as :meth:`PPO.iterate`.
    """
    config, metrics = ppo.config, out / METRICS
    if ppo.updates:
        truncate_records(metrics, ppo.updates)
    begun, printed, first = time.monotonic(), 0.0, ppo.updates
    with SummaryWriter(out, purge_step=ppo.steps + 1 if ppo.updates else None) as board:
        board.add_text("provenance", f"```\n{json.dumps(provenance(ppo), indent=2)}\n```", ppo.steps)
        reached = False
        while ppo.updates < config.updates and not reached:
            record = ppo.iterate()
            append_record(record, metrics, board)
            if config.stop_at is not None and len(ppo.returns) == RETURN_WINDOW:
                reached = record["return_mean"] >= config.stop_at
            ended = reached or ppo.updates == config.updates
            if ended or ppo.updates % config.save_every == 0 or ppo.updates == 1:
                save_checkpoint(ppo, out / CHECKPOINT)
            if ended or time.monotonic() - printed > 2:
                printed = time.monotonic()
                print(progress_line(record, ppo, (printed - begun) / (ppo.updates - first)), flush=True)
    if reached:
        print(f"the return has reached --stop-at {config.stop_at:g}", flush=True)
    plot_curves(metrics, config, out / CURVES)
    if config.eval_episodes:
        evaluate(ppo, out / EVALUATION)


def evaluate(ppo: PPO, path: Path) -> None:
    """Play ``eval_episodes`` episodes; print their mean return and write it with the run's provenance."""
    returns = ppo.evaluate(ppo.config.eval_episodes)
    mean, deviation = float(np.mean(returns)), float(np.std(returns))
    print(f"{len(returns)} episodes by the most probable actions: return {mean:.1f} ± {deviation:.1f}", flush=True)
    result = {"steps": ppo.steps, "episodes": len(returns), "mean": mean, "std": deviation, "least": min(returns)}
    path.write_text(json.dumps(result | provenance(ppo), indent=1) + "\n")


def progress_line(record: Mapping[str, Any], ppo: PPO, seconds: float) -> str:
    """Return one line on the run's progress; ``seconds`` is the time that an update takes."""
    minutes, seconds = divmod(round((ppo.config.updates - ppo.updates) * seconds), 60)
    mean = "–" if record["return_mean"] is None else f"{record['return_mean']:.1f}"
    total = ppo.steps // ppo.updates * ppo.config.updates
    return (
        f"step {ppo.steps}/{total}  return {mean}  kl {record['approx_kl']:.1e}  "
        f"ratio {record['ratio_deviation']:.1e}  loss scale {record['loss_scale']:g}  "
        f"skipped {record['overflow_steps']}  {record['steps_per_second']:.0f} steps/s  left {minutes}:{seconds:02d}"
    )
