"""Start ``scripts/run.py`` on the CPU, as ``make run`` does, with batches small enough for a test."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from lib.paths import ARITHMETIC, REPO

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
SCALER = f"{ACTOR}.fsdp_config.grad_scaler"
HANGS_S = 1800


def small_batch(micro_batch: int = 64) -> list[str]:
    """Return the overrides of a batch of 8 prompts in one update.

    Args:
        micro_batch: responses in a worker's micro-batch.
    """
    return [
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={micro_batch}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={micro_batch}",
    ]


def command(out: Path, steps: int, overrides: Iterable[str], *words: str) -> list[str | Path]:
    """Return the command of a run of ``steps`` steps into ``out``, with further ``NAME=VALUE`` words."""
    settings = ["DEVICE=cpu", f"STEPS={steps}", f"OUT={out}", *words, f"ARGS={' '.join(overrides)}"]
    return [sys.executable, REPO / "scripts" / "run.py", *settings]


def start_run(
    out: Path,
    steps: int,
    overrides: Iterable[str],
    *words: str,
    screen: Path,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen:
    """Start a run whose output goes to the file ``screen``; ``environment`` is added to this process's."""
    with screen.open("w") as output:
        return subprocess.Popen(
            command(out, steps, overrides, *words),
            env=os.environ | (environment or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish_run(out: Path, steps: int, overrides: Iterable[str], *words: str) -> tuple[int, str]:
    """Run to the end. Return the exit code and the output."""
    done = subprocess.run(
        command(out, steps, overrides, *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANGS_S,
    )
    return done.returncode, done.stdout


def generate_task() -> Path:
    """Generate the sanity task's model and data if missing. Return their folder."""
    prepare = [sys.executable, "-m", "recipes.arithmetic.prepare", "--task", "addition", "--out", ARITHMETIC]
    subprocess.run([*prepare, "--seed", "1"], cwd=REPO, check=True)
    return ARITHMETIC
