"""A storm of overflows in verl's two PPO trainers: the run ends with one error, and the last good state is on disk."""

import shutil
from pathlib import Path

import pytest
import torch
from small_runs import SCALER, finish_run, small_batch

from lib.files import read_jsonl


def storm(out: Path, scale: str, *overrides: str) -> str:
    """Train with a loss scale at which every step overflows. Return the output."""
    scaler = [f"{SCALER}.init_scale={scale}", f"{SCALER}.min_scale={scale}", f"{SCALER}.max_consecutive_skips=2"]
    code, output = finish_run(out, 9, [*small_batch(), "trainer.save_freq=-1", *scaler, *overrides], "RETRIES=2")
    assert code == 1, output
    return output


def actor_state(checkpoint: Path, kind: str) -> dict:
    return torch.load(checkpoint / "actor" / f"{kind}_world_size_1_rank_0.pt", weights_only=False)


@pytest.fixture(scope="module")
def v1(tmp_path_factory) -> tuple[Path, str]:
    """A storm in the trainer that verl uses by default, and what the run printed."""
    out = tmp_path_factory.mktemp("storm") / "v1"
    return out, storm(out, "1e30")


def check_storm(out: Path, screen: str, scale: float, step: int) -> None:
    """Check the error and the last step's metrics of a run that ended at ``scale`` in the step after ``step``."""
    assert "LossScaleError: 2 optimizer steps in a row overflowed (grad_scaler.max_consecutive_skips)" in screen
    assert f"loss scale {scale:g}, first non-finite gradient: " in screen
    row = read_jsonl(out / "metrics.jsonl")[-1]
    assert row["step"] == step and row["data"]["actor/loss_scale"] == pytest.approx(scale)
    assert row["data"]["actor/skipped_steps"] == 1 and "actor/grad_norm" not in row["data"]


@pytest.mark.e2e
def test_storm_leaves_a_checkpoint(v1):
    out, screen = v1
    check_storm(out, screen, 1e30, step=1)
    # Saved under the number of the unfinished step, although save_freq=-1.
    assert [folder.name for folder in (out / "checkpoints").glob("global_step_*")] == ["global_step_2"]
    assert (out / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.e2e
@pytest.mark.slow
def test_other_trainer_resumes_from_the_storms_checkpoint(v1, tmp_path):
    checkpoints, out = tmp_path / "checkpoints", tmp_path / "v0"
    shutil.copytree(v1[0] / "checkpoints", checkpoints)
    screen = storm(out, "1e29", "trainer.use_v1=false", f"trainer.default_local_dir={checkpoints}")
    check_storm(out, screen, 1e29, step=3)  # it starts with the step after the unfinished one
    assert sorted(folder.name for folder in checkpoints.glob("global_step_*")) == ["global_step_2", "global_step_4"]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "4"
    # The weights are unchanged: every step was skipped.
    weights = [actor_state(checkpoints / f"global_step_{step}", "model") for step in (2, 4)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    # It started from its own scale and count, not from those of the storm.
    assert "holds no loss scale: starting at 1e+29" in (out / "train.log").read_text()
