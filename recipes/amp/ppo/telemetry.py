"""Write a run's records to metrics.jsonl and TensorBoard, and plot them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from recipes.amp.options import finite
from recipes.amp.ppo.checkpoint import ResumeError
from recipes.amp.ppo.config import RETURN_WINDOW, PPOConfig


def append_record(record: Mapping[str, Any], metrics: Path, board: SummaryWriter) -> None:
    """Append a line of JSON, and TensorBoard's scalars (strings as text, each dtype's share a scalar) at ``steps``."""
    plain = finite(record)
    with metrics.open("a") as file:
        file.write(json.dumps(plain, allow_nan=False) + "\n")
    for name, value in plain.items():
        if isinstance(value, str):
            board.add_text(name, value, record["steps"])
        elif isinstance(value, dict):
            for key, share in value.items():
                board.add_scalar(f"{name}/{key}", share, record["steps"])
        elif value is not None:
            board.add_scalar(name, float(value), record["steps"])


def truncate_records(metrics: Path, updates: int) -> None:
    """Keep the records of the first ``updates`` updates: those after the checkpoint are made again.

    Raises:
        ResumeError: a line is no record.
    """
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    try:
        whole = {line: json.loads(line)["update"] for line in lines if line.endswith("\n")}
    except (ValueError, KeyError, TypeError):
        raise ResumeError(f"{metrics}: a line is not the record of an update; repair or remove the file") from None
    metrics.write_text("".join(line for line, update in whole.items() if update <= updates))


def plot_curves(metrics: Path, config: PPOConfig, path: Path) -> None:
    """Plot return, policy and loss scale over the steps; the title names every dtype that the run trained in."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    panels = {
        f"return, mean of {RETURN_WINDOW} episodes": ["return_mean"],
        "policy": ["entropy", "approx_kl", "clip_fraction"],
        "loss scale": ["loss_scale"],
        "updates skipped so far": ["overflow_steps"],
    }
    if all(record["loss_scale"] == 1 and not record["overflow_steps"] for record in records):  # there was none
        panels = dict(list(panels.items())[:2])
    size = {"figsize": (10, 3.4 * len(panels) / 2), "layout": "constrained"}
    figure, axes = plt.subplots(len(panels) // 2, 2, sharex=True, squeeze=False, **size)
    for axis, (name, keys) in zip(axes.flat, panels.items(), strict=True):
        for key in keys:
            known = [record for record in records if record[key] is not None]
            axis.plot([record["steps"] for record in known], [record[key] for record in known], label=key)
        axis.set(title=name, xlabel="steps of all environments")
        axis.grid(alpha=0.3)
    axes.flat[1].legend()
    if len(panels) == 4:
        axes.flat[2].set_yscale("log", base=2)
    dtypes = " then ".join(dict.fromkeys(record["effective_dtype"] for record in records))
    figure.suptitle(f"{config.env}, {dtypes}, seed {config.seed}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
