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
from recipes.amp.options import finite, new_folder, parse_config
from recipes.amp.ppo.algorithm import PPO, PPOConfig
from verl.utils.precision import LossScaleError, dtype_name

PROGRAM = "recipes.amp.ppo"
CHECKPOINT, METRICS, EVALUATION = "checkpoint.pt", "metrics.jsonl", "evaluation.json"
SAVE_EVERY = 50  # updates between checkpoints
PROGRESS = ("device", "updates", "episodes", "returns", "generator")  # of a run, in its checkpoint
MAY_CHANGE = ("out", "resume", "total_steps", "eval_episodes", "device", "compile", "use_amp", "dtype", "loss_scale")


class ResumeError(ValueError):
    """Files from which a run cannot be resumed; the message is one line."""


def train(ppo: PPO, out: Path) -> None:
    """Run to the end of the config, into the folder ``out``; replace records after a resumed run's checkpoint."""
    config, metrics = ppo.config, out / METRICS
    truncate_records(metrics, ppo.updates)
    with SummaryWriter(out, purge_step=ppo.steps + 1 if ppo.updates else None) as board:
        board.add_text("config", f"```\n{json.dumps(description(ppo), indent=2)}\n```", ppo.steps)
        while ppo.updates < config.updates:
            record = ppo.iterate()
            append_record(record, metrics, board)
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


def append_record(record: Mapping[str, Any], metrics: Path, board: SummaryWriter) -> None:
    """Append a line of JSON, and TensorBoard's scalars (strings as text, each dtype's share a scalar) at ``steps``."""
    plain = finite(record)
    with metrics.open("a") as file:
        file.write(json.dumps(plain, allow_nan=False) + "\n")
    shares = plain.pop("effective_dtype_share")
    for name, value in (plain | {f"effective_dtype_share/{dtype}": share for dtype, share in shares.items()}).items():
        if isinstance(value, str):
            board.add_text(name, value, record["steps"])
        elif value is not None:
            board.add_scalar(name, float(value), record["steps"])


def truncate_records(metrics: Path, updates: int) -> None:
    """Keep the records of the first ``updates`` updates: those after the checkpoint are made again."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    try:
        complete = {line: json.loads(line)["update"] for line in lines if line.endswith("\n")}
    except (ValueError, KeyError, TypeError):
        raise ResumeError(f"{metrics}: a line is not the record of an update; repair or remove the file") from None
    metrics.write_text("".join(line for line, update in complete.items() if update <= updates))


def save_checkpoint(ppo: PPO, path: Path) -> None:
    """Write a checkpoint that :func:`resume` continues from."""
    progress = (ppo.device.type, ppo.updates, ppo.episodes, list(ppo.returns), ppo.generator.get_state())
    ppo.trainer.save_checkpoint(path, {**description(ppo), **dict(zip(PROGRESS, progress, strict=True))})


def resume(ppo: PPO, path: Path) -> str:
    """Load networks, Adam, loss scale, counters and random numbers, and return the dtype that they were trained in.

    The environments are reset. A checkpoint that does not fit raises ``ResumeError`` or ``InvalidCheckpointError``.
    """
    if not path.exists():
        raise ResumeError(f"{path}: there is no checkpoint to resume from; leave out --resume")
    saved = read_checkpoint(path)["extra"]
    if saved.get("recipe") != "ppo" or not {"config", "precision", *PROGRESS} <= saved.keys():
        raise ResumeError(f"{path}: not a checkpoint of PPO")
    for key, value in asdict(ppo.config).items():
        if key not in MAY_CHANGE and saved["config"].get(key) != value:
            raise ResumeError(f"{path}: made with {key}={saved['config'].get(key)}, not {value}; resume with that")
    made_on, updates, episodes, returns, generator = (saved[name] for name in PROGRESS)
    if made_on != ppo.device.type:  # which has different random numbers
        raise ResumeError(f"{path}: made on {made_on}, not {ppo.device.type}; resume with --device {made_on}")
    ppo.trainer.load_checkpoint(path)
    ppo.updates, ppo.episodes = updates, episodes
    ppo.returns.extend(returns)
    ppo.generator.set_state(generator)
    ppo.restart_environments()
    return saved["precision"]["effective_dtype"]


def main(words: Optional[Sequence[str]] = None) -> None:
    """Run the command line ``words`` (``sys.argv`` by default); an error ends the process with one line and code 1."""
    config, sources = parse_config(PPOConfig, PROGRAM, __doc__.splitlines()[0], words)
    if not config.out:
        sys.exit(f"{PROGRAM}: --out is missing; give a folder for metrics and checkpoint")
    out = Path(config.out)
    try:
        if not config.resume and any((out / name).exists() for name in (METRICS, CHECKPOINT)):
            raise ValueError(f"out={out} must be a folder without results: it contains a run, which --resume continues")
        ppo = PPO(config, sources)
        if config.resume:
            before = resume(ppo, out / CHECKPOINT)
        else:
            new_folder(out)
    except (ValueError, OSError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    precision, compute = ppo.precision(), dtype_name(ppo.trainer.precision.compute)
    if config.resume:
        changed = "" if before == compute else f" in {compute}, previously in {before}"
        print(f"resuming after step {ppo.steps}{changed}; the environments are reset")
    reason = precision["fallback"] or precision["amp_source"]
    print(f"{compute} on {ppo.device.type}, AMP {'on' if precision['amp_enabled'] else 'off'} ({reason})")
    try:
        train(ppo, out)
    except (ResumeError, InvalidEnvironmentError, LossScaleError, FloatingPointError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{PROGRAM}: interrupted; the same command with --resume continues from the last checkpoint")
    ppo.envs.vector.close()
    print(f"{out}: {', '.join(sorted(file.name for file in out.iterdir()))}")


if __name__ == "__main__":
    main()
