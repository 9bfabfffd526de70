"""The provenance of a run: its settings, environment, versions and commit."""

import platform
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import gymnasium
import torch

from recipes.amp.ppo.algorithm import PPO

CHECKOUT = Path(__file__).resolve().parents[3]


def commit() -> Optional[str]:
    """Return the checkout's commit; ``None`` without git, or where git refuses another user's checkout."""
    if not (CHECKOUT / ".git").exists() or not shutil.which("git"):
        return None
    done = subprocess.run(["git", "-C", CHECKOUT, "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or None


def provenance(ppo: PPO) -> dict[str, Any]:
    """Return the provenance of a run, in plain values."""
    spec = ppo.envs.vector.spec
    return {
        "recipe": "ppo",
        "config": asdict(ppo.config),
        "sources": ppo.sources,
        "env": {
            "id": spec.id,
            "entry_point": str(spec.entry_point),
            "max_episode_steps": spec.max_episode_steps,
            "observations": str(ppo.envs.observation_space),
            "actions": str(ppo.envs.action_space),
            "mode": ppo.envs.mode,
        },
        "precision": ppo.precision(),
        "versions": {
            "torch": str(torch.__version__),
            "gymnasium": gymnasium.__version__,
            "python": platform.python_version(),
        },
        "commit": commit(),
    }
