"""Train PPO on Gymnasium's vector environments, in fp32 or with autocast to 16 bits.

    python -m recipes.amp.ppo --env CartPole-v1 --out DIR                                   float32
    python -m recipes.amp.ppo --env CartPole-v1 --use-amp --out DIR                         float16, on a GPU
    python -m recipes.amp.ppo --env CartPole-v1 --use-amp --device cpu --out DIR            float16, on a CPU

AMP is off by default; ``DISABLE_AMP=1`` in the environment overrules --use-amp. Rollout and update
run the same networks in the same dtype, each in an autocast region of its own, so that the ratio of new to old
probabilities starts at 1. What follows the networks (softmax, ratio, losses, advantages) is fp32. Updates are
:class:`recipes.amp.trainer.FP16Trainer`'s.

DIR gets ``metrics.jsonl`` and TensorBoard's events (one record an update, the same names), ``checkpoint.pt`` and
``curves.png``. After an interrupt, the same command with ``--resume`` continues.

Schulman et al. 2017, arXiv 1707.06347; generalised advantages: Schulman et al. 2016, arXiv 1506.02438.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from recipes.amp.options import new_folder, parse
from recipes.amp.ppo.algorithm import PPO
from recipes.amp.ppo.checkpoint import ResumeError, resume
from recipes.amp.ppo.config import PPOConfig
from recipes.amp.ppo.environments import InvalidEnvironmentError
from recipes.amp.ppo.train import CHECKPOINT, METRICS, train
from verl.utils.precision import LossScaleError, dtype_name

PROGRAM = "recipes.amp.ppo"


def main(words: Optional[Sequence[str]] = None) -> None:
    """Run the command line ``words`` (``sys.argv`` by default); an error ends the process with one line and code 1."""
    config, sources = parse(PPOConfig, PROGRAM, __doc__.splitlines()[0], words)
    if not config.out:
        sys.exit(f"{PROGRAM}: --out is missing; give a folder for metrics, checkpoint and figure")
    out = Path(config.out)
    try:
        if not config.resume and any((out / name).exists() for name in (METRICS, CHECKPOINT)):
            raise ValueError(f"out={out} must be a folder without results: it contains a run, which --resume continues")
        ppo = PPO(config, sources)
        if config.resume:
            dtype_before = resume(ppo, out / CHECKPOINT)
        else:
            new_folder(out)
    except (ValueError, OSError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    precision, compute = ppo.precision(), dtype_name(ppo.trainer.precision.compute)
    reason = precision["fallback"] or precision["amp_source"]
    print(
        f"{config.env}: {config.num_envs} environments ({ppo.envs.mode}), {ppo.envs.action_space}; {compute} on "
        f"{ppo.device.type}, AMP {'on' if precision['amp_enabled'] else 'off'} ({reason})"
    )
    if config.resume:
        changed = "" if dtype_before == compute else f" in {compute}, previously in {dtype_before}"
        print(f"resuming after step {ppo.steps}{changed}; the environments start anew")
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
