"""FlowRL on the sanity task in fp16, as ``make run RECIPE=flowrl`` starts it: its first loss, its checkpoint, resumed.

The first run records its rollouts; the second resumes from its checkpoint and replays them.
"""

import json
import math
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same_checkpoint, training_metrics
from safetensors import safe_open
from small_runs import ACTOR, SCALER, finish_run

from lib.paths import ARITHMETIC

STEPS = 3
OVERRIDES = [
    "data.train_batch_size=16",
    f"{ACTOR}.ppo_mini_batch_size=16",
    "algorithm.rollout_correction.rollout_is=token",
    # A loss scale that doubles at every step that is not skipped.
    f"{SCALER}.init_scale=1024",
    f"{SCALER}.growth_interval=1",
]


def train(out: Path, *overrides: str) -> str:
    """Train to the end. Return the output."""
    code, output = finish_run(out, STEPS, [*OVERRIDES, *overrides], "RECIPE=flowrl")
    assert code == 0, output
    return output


def share_of_mixed_groups(dump: Path) -> float:
    """Return the share of a step's prompts whose answers got different rewards."""
    rewards = defaultdict(set)
    for line in dump.read_text().splitlines():
        answer = json.loads(line)
        rewards[answer["uid"].rsplit("_", 2)[0]].add(answer["score"])
    assert len(rewards) == 16
    return sum(len(scores) > 1 for scores in rewards.values()) / len(rewards)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("flowrl") / "rollouts.sqlite"


@pytest.fixture(scope="module")
def whole(rollouts) -> tuple[Path, str]:
    """The run that records its rollouts, and what it printed."""
    out = rollouts.with_name("whole")
    dumps = f"trainer.rollout_data_dir={rollouts.with_name('dumps')}"
    return out, train(out, f"+rollouts=record rollouts.file={rollouts}", dumps)


@pytest.mark.e2e
def test_flowrl_trains_in_fp16(whole, rollouts):
    whole, screen = whole
    steps = training_metrics(whole)

    # Before any update the policy is the reference and log Z is 0: each mixed group contributes β²·(n−1)/n.
    first = steps[1]
    assert first["actor/flowrl/log_z"] == 0 and first["actor/flowrl/reference_kl"] == pytest.approx(0, abs=1e-6)
    expected = 15**2 * 7 / 8 * share_of_mixed_groups(rollouts.with_name("dumps") / "1.jsonl")
    assert first["actor/pg_loss"] == pytest.approx(expected, rel=1e-3)
    # Importance weights between trainer and rollout, whose mismatch is about 1e-5 per token.
    assert 0 < abs(first["actor/flowrl/weight"] - 1) < 1e-3

    names = {name for name in first if "flowrl/" in name}
    assert {name.rpartition("/")[2] for name in names} == {
        *("delta", "delta_std", "log_z", "weight", "clipped", "effective_samples", "reference_kl"),
        *("partition_grad_norm", "distinct_right_answers", "right_answers"),
    }
    assert all(math.isfinite(row[name]) for row in steps.values() for name in names)
    assert all(row["flowrl/right_answers"] == row["critic/score/mean"] for row in steps.values())
    assert [row["actor/loss_scale"] / first["actor/loss_scale"] for row in steps.values()] == [1, 2, 4]
    assert steps[2]["actor/flowrl/log_z"] != 0 and "delta_std" in screen

    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["recipe"], summary["precision"], summary["skipped_steps"]) == ("flowrl", "fp16", 0)
    dtypes = summary["effective_dtypes"]
    assert dtypes["actor"]["compute"] == dtypes["ref"]["compute"] == dtypes["rollout"]["rollout"] == "float16"
    assert dtypes["actor"]["master"] == "float32" and dtypes["actor"]["loss_scaling"] is True
    assert summary["flowrl"]["log_z"]["first"] == 0 and (whole / "curves.png").exists()

    # The head is saved in a file of its own, not with the model.
    saved = whole / "checkpoints" / f"global_step_{STEPS}"
    assert "actor/flowrl_partition.pt" in json.loads((saved / "manifest.json").read_text())["files"]
    weights = torch.load(saved / "actor" / "model_world_size_1_rank_0.pt", weights_only=False)
    with safe_open(ARITHMETIC / "model" / "model.safetensors", "pt") as model:
        assert weights.keys() == set(model.keys())
    head = torch.load(saved / "actor" / "flowrl_partition.pt")
    assert {tensor.dtype for tensor in head["head"].values()} == {torch.float32}
    assert {int(state["step"]) for state in head["optimizer"]["state"].values()} == {STEPS}


@pytest.mark.e2e
@pytest.mark.slow
def test_resumed_step_is_bit_exact(whole, rollouts, tmp_path):
    """Model, Adam, head, its Adam, loss scale, RNG and data of step 3, resumed after step 2."""
    (whole, _), rest, resumed = whole, tmp_path / "rest", tmp_path / "checkpoints"
    steps, saved = training_metrics(whole), whole / "checkpoints" / f"global_step_{STEPS}"
    shutil.copytree(whole / "checkpoints" / "global_step_2", resumed / "global_step_2")
    (resumed / "latest_checkpointed_iteration.txt").write_text("2")
    train(rest, f"+rollouts=replay rollouts.file={rollouts} trainer.default_local_dir={resumed}")
    # Model, optimizer, extra state and head of the actor, and the data loader's.
    assert_same_checkpoint(saved, resumed / f"global_step_{STEPS}", files=5)
    ((step, resumed_metrics),) = training_metrics(rest).items()
    checked_first = {"training/weight_sync_diff", "training/weight_sync_spread"}  # each run checks its first step
    assert step == STEPS and resumed_metrics.keys() - steps[STEPS].keys() == checked_first
    assert {name: resumed_metrics.get(name) for name in steps[STEPS]} == steps[STEPS]
