"""Train PPO on Gymnasium's vector environments, in fp32 or with autocast to 16 bits.

    python -m recipes.amp.ppo --env CartPole-v1 --out DIR                                   float32
    python -m recipes.amp.ppo --env CartPole-v1 --use-amp --out DIR                         float16, on a GPU
    python -m recipes.amp.ppo --env CartPole-v1 --use-amp --device cpu --out DIR            float16, on a CPU

AMP is off by default; ``DISABLE_AMP=1`` in the environment overrules --use-amp. Rollout and update run the same
networks in the same dtype, in separate autocast regions, so that the ratio of new to old probabilities starts at 1.
Softmax, ratio, losses and advantages are fp32.

DIR gets ``metrics.jsonl`` and TensorBoard's events (one record an update, the same names), ``checkpoint.pt`` and
``evaluation.json``. After an interrupt, the same command with ``--resume`` continues.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Optional

from torch.utils.tensorboard import SummaryWriter

from recipes.amp.checkpoint import read_checkpoint
from recipes.amp.environment import InvalidEnvironmentError
from recipes.amp.options import METRICS, append_record, new_folder, parse_config
from recipes.amp.ppo.algorithm import PPO, PPOConfig
from verl.utils.precision import LossScaleError, dtype_name

PROGRAM = "recipes.amp.ppo"
CHECKPOINT, EVALUATION = "checkpoint.pt", "evaluation.json"
SAVE_EVERY = 50  # updates between checkpoints
MAY_CHANGE = ("out", "resume", "total_steps", "eval_episodes", "device", "compile", "use_amp", "dtype", "loss_scale")


def train(ppo: PPO, out: Path) -> None:
    """Run to the end of the config, into the folder ``out``."""
    config = ppo.config
    with SummaryWriter(out, purge_step=ppo.steps + 1) as board:
        board.add_text("config", f"```\n{json.dumps(description(ppo), indent=2)}\n```", ppo.steps)
        while ppo.updates < config.updates:
            record = ppo.iterate()
            append_record(out, record)
            for name, value in record.items():
                if isinstance(value, str):
                    board.add_text(name, value, ppo.steps)
                elif isinstance(value, int | float):
                    board.add_scalar(name, value, ppo.steps)
            if ppo.updates % SAVE_EVERY == 0 or ppo.updates in (1, config.updates):
                save_checkpoint(ppo, out / CHECKPOINT)
            mean = "-" if record["return_mean"] is None else f"{record['return_mean']:.1f}"
            print(
                f"update {ppo.updates}/{config.updates}  return {mean}  kl {record['approx_kl']:.1e}  ratio "
                f"{record['ratio_deviation']:.1e}  loss scale {record['loss_scale']:g}  skipped "
                f"{record['overflow_steps']}  {record['steps_per_second']:.0f} steps/s",
                flush=True,
            )
    returns = ppo.evaluate(config.eval_episodes)
    print(f"{len(returns)} episodes by the most probable actions: mean return {fmean(returns):.1f}", flush=True)
    result = {"steps": ppo.steps, "episodes": len(returns), "mean": fmean(returns), "least": min(returns)}
    (out / EVALUATION).write_text(json.dumps(result | description(ppo), indent=1) + "\n")


def description(ppo: PPO) -> dict[str, Any]:
    """Return the settings of a run, their sources, and its dtype, in plain values."""
    return {"recipe": "ppo", "config": asdict(ppo.config), "sources": ppo.sources, "precision": ppo.precision()}


def fixed_settings(ppo: PPO) -> Mapping[str, Any]:
    """Return the settings that a resumed run must have; another device has different random numbers."""
    same = {key: value for key, value in asdict(ppo.config).items() if key not in MAY_CHANGE}
    return same | {"device": ppo.device.type}


def save_checkpoint(ppo: PPO, path: Path) -> None:
    """Write a checkpoint that :func:`resume` continues from."""
    progress = {"updates": ppo.updates, "episodes": ppo.episodes, "returns": list(ppo.returns)}
    progress |= {"fixed": fixed_settings(ppo), "generator": ppo.generator.get_state()}
    ppo.trainer.save_checkpoint(path, description(ppo) | progress)


def resume(ppo: PPO, out: Path) -> None:
    """Load networks, Adam, loss scale, counters and random numbers; reset the environments.

    Records of updates after the checkpoint, which are made again, are removed. Files that do not fit raise
    ``ValueError``, also as ``InvalidCheckpointError``, or ``OSError``.
    """
    path, metrics = out / CHECKPOINT, out / METRICS
    saved = read_checkpoint(path)["extra"]
    if saved.get("recipe") != "ppo":
        raise ValueError(f"{path}: not a checkpoint of PPO")
    for key, value in fixed_settings(ppo).items():
        if saved["fixed"].get(key) != value:
            raise ValueError(f"{path}: made with {key}={saved['fixed'].get(key)}, not {value}; resume with that")
    lines = metrics.read_text().splitlines(keepends=True)
    ppo.trainer.load_checkpoint(path)
    ppo.updates, ppo.episodes = saved["updates"], saved["episodes"]
    ppo.returns.extend(saved["returns"])
    ppo.generator.set_state(saved["generator"])
    ppo.restart_environments()
    metrics.write_text("".join(lines[: ppo.updates]))


def main(words: Optional[Sequence[str]] = None) -> None:
    """Run the command line ``words`` (``sys.argv`` by default); an error ends the process with one line and code 1."""
    config, sources = parse_config(PPOConfig, PROGRAM, __doc__.splitlines()[0], words)
    out = Path(config.out)
    try:
        ppo = PPO(config, sources)
        if config.resume:
            resume(ppo, out)
            print(f"resuming after step {ppo.steps}; the environments are reset")
        else:
            new_folder(out)
    except (ValueError, OSError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    precision = ppo.precision()
    amp, reason = "on" if precision["amp_enabled"] else "off", precision["fallback"] or precision["amp_source"]
    print(f"{dtype_name(ppo.trainer.precision.compute)} on {ppo.device.type}, AMP {amp} ({reason})")
    try:
        train(ppo, out)
    except (InvalidEnvironmentError, LossScaleError, FloatingPointError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{PROGRAM}: interrupted; the same command with --resume continues from the last checkpoint")
    print(out / EVALUATION)


if __name__ == "__main__":
    main()
