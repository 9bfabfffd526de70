"""A storm of overflows in verl's two PPO trainers: the run ends with one error, and the last good state is on disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lib.paths import REPO

SCALER = "actor_rollout_ref.actor.fsdp_config.grad_scaler"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SMALL = (
    f"data.train_batch_size=8 {ACTOR}.ppo_mini_batch_size=8 {ACTOR}.ppo_micro_batch_size_per_gpu=64"
    f" {ROLLOUT}.log_prob_micro_batch_size_per_gpu=64 trainer.save_freq=-1"
)


def storm(out: Path, scale: str, *overrides: str) -> str:
    """Train with a loss scale at which every step overflows; what the screen shows."""
    scaler = f"{SCALER}.init_scale={scale} {SCALER}.min_scale={scale} {SCALER}.max_consecutive_skips=2"
    words = [f"OUT={out}", "STEPS=9", "DEVICE=cpu", "RETRIES=2", f"ARGS={' '.join([SMALL, scaler, *overrides])}"]
    run = subprocess.run([sys.executable, REPO / "scripts" / "run.py", *words], capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    return run.stdout


def actor_state(checkpoint: Path, kind: str) -> dict:
    return torch.load(checkpoint / "actor" / f"{kind}_world_size_1_rank_0.pt", weights_only=False)


@pytest.mark.e2e
def test_a_storm_leaves_a_checkpoint_that_the_other_trainer_takes_up(tmp_path):
    checkpoints = tmp_path / "v1" / "checkpoints"
    first = storm(tmp_path / "v1", "1e30")
    second = storm(tmp_path / "v0", "1e29", "trainer.use_v1=false", f"trainer.default_local_dir={checkpoints}")
    for screen, scale in ((first, "1e+30"), (second, "1e+29")):
        assert "LossScaleError: 2 optimizer steps in a row overflowed (grad_scaler.max_consecutive_skips)" in screen
        assert f"loss scale {scale}, first non-finite gradient: " in screen

    # Saved under the number of the unfinished step, although save_freq=-1; the second run starts behind it.
    assert sorted(folder.name for folder in checkpoints.glob("global_step_*")) == ["global_step_2", "global_step_4"]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "4"
    # Nothing was learnt: every step was skipped.
    weights = [actor_state(checkpoints / f"global_step_{step}", "model") for step in (2, 4)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    # The second run took its own scale, not the one that did not work, and counted afresh.
    assert "holds no loss scale: starting at 1e+29" in (tmp_path / "v0" / "train.log").read_text()
    for out, step, scale in (("v1", 1, 1e30), ("v0", 3, 1e29)):
        row = json.loads((tmp_path / out / "metrics.jsonl").read_text().splitlines()[-1])
        assert row["step"] == step and row["data"]["actor/loss_scale"] == pytest.approx(scale)
        assert row["data"]["actor/skipped_steps"] == 1 and "actor/grad_norm" not in row["data"]
