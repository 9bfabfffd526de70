"""Train PPO on Gymnasium's vector environments, in fp32 or with autocast to 16 bits.

    python -m recipes.amp.ppo --env CartPole-v1 --out DIR                                   float32
    python -m recipes.amp.ppo --env CartPole-v1 --use-amp --out DIR                         float16, on a GPU
    python -m recipes.amp.ppo --env CartPole-v1 --use-amp --device cpu --out DIR            float16, on a CPU

AMP is off by default; ``DISABLE_AMP=1`` in the environment overrules --use-amp. Rollout and update run the same
networks in the same dtype, in separate autocast regions, so that the ratio of new to old probabilities starts at 1.
Softmax, ratio, losses and advantages are fp32.

DIR gets ``metrics.jsonl`` and TensorBoard's events (one record an update, the same names), ``checkpoint.pt`` and
``evaluation.json``.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Optional

from torch.utils.tensorboard import SummaryWriter

from recipes.amp.environment import InvalidEnvironmentError
from recipes.amp.options import append_record, new_folder, parse_config
from recipes.amp.ppo.algorithm import PPO, PPOConfig
from verl.utils.precision import LossScaleError, dtype_name

PROGRAM = "recipes.amp.ppo"
CHECKPOINT, EVALUATION = "checkpoint.pt", "evaluation.json"


def train(ppo: PPO, out: Path) -> None:
    """Run to the end of the config, into the folder ``out``."""
    config = ppo.config
    with SummaryWriter(out) as board:
        board.add_text("config", f"```\n{json.dumps(description(ppo), indent=2)}\n```", ppo.steps)
        while ppo.updates < config.updates:
            record = ppo.iterate()
            append_record(out, record)
            for name, value in record.items():
                if isinstance(value, str):
                    board.add_text(name, value, ppo.steps)
                elif isinstance(value, int | float):
                    board.add_scalar(name, value, ppo.steps)
            mean = "-" if record["return_mean"] is None else f"{record['return_mean']:.1f}"
            print(
                f"update {ppo.updates}/{config.updates}  return {mean}  kl {record['approx_kl']:.1e}  ratio "
                f"{record['ratio_deviation']:.1e}  loss scale {record['loss_scale']:g}  skipped "
                f"{record['overflow_steps']}  {record['steps_per_second']:.0f} steps/s",
                flush=True,
            )
    ppo.trainer.save_checkpoint(out / CHECKPOINT, description(ppo))
    returns = ppo.evaluate(config.eval_episodes)
    print(f"{len(returns)} episodes by the most probable actions: mean return {fmean(returns):.1f}", flush=True)
    result = {"steps": ppo.steps, "episodes": len(returns), "mean": fmean(returns), "least": min(returns)}
    (out / EVALUATION).write_text(json.dumps(result | description(ppo), indent=1) + "\n")


def description(ppo: PPO) -> dict[str, Any]:
    """Return the settings of a run, their sources, and its dtype, in plain values."""
    return {"recipe": "ppo", "config": asdict(ppo.config), "sources": ppo.sources, "precision": ppo.precision()}


def main(words: Optional[Sequence[str]] = None) -> None:
    """Run the command line ``words`` (``sys.argv`` by default); an error ends the process with one line and code 1."""
    config, sources = parse_config(PPOConfig, PROGRAM, __doc__.splitlines()[0], words)
    try:
        ppo, out = PPO(config, sources), new_folder(config.out)
    except ValueError as error:
        sys.exit(f"{PROGRAM}: {error}")
    precision = ppo.precision()
    amp, reason = "on" if precision["amp_enabled"] else "off", precision["fallback"] or precision["amp_source"]
    print(f"{dtype_name(ppo.trainer.precision.compute)} on {ppo.device.type}, AMP {amp} ({reason})")
    try:
        train(ppo, out)
    except (InvalidEnvironmentError, LossScaleError, FloatingPointError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{PROGRAM}: interrupted")
    print(out / EVALUATION)


if __name__ == "__main__":
    main()
