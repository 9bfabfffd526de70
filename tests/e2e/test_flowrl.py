"""FlowRL on the sanity task in fp16, as ``make run RECIPE=flowrl`` starts it: its first loss, its checkpoint, resumed.

The first run records its rollouts; the second resumes from its checkpoint and replays them.
"""

import json
import math
import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same_checkpoint, training_metrics
from safetensors import safe_open
from small_runs import FLOWRL, FLOWRL_STEPS, Run, start_run

from verl_precision.paths import ARITHMETIC
from verl_precision.spelling import MADE


def share_of_mixed_groups(dump: Path) -> float:
    """Return the share of a step's prompts whose answers got different rewards."""
    rewards = defaultdict(set)
    for line in dump.read_text().splitlines():
        answer = json.loads(line)
        rewards[answer["uid"].rsplit("_", 2)[0]].add(answer["score"])
    assert len(rewards) == 16
    return sum(len(scores) > 1 for scores in rewards.values()) / len(rewards)


@pytest.fixture(scope="module")
def whole(flowrl) -> Run:
    """The finished run that recorded its rollouts."""
    flowrl.finish()
    return flowrl


@pytest.mark.e2e
def test_flowrl_trains_in_fp16(whole):
    steps = training_metrics(whole.out)

    # Before any update the policy is the reference and log Z is 0: each mixed group contributes β²·(n−1)/n.
    first = steps[1]
    assert first["actor/flowrl/log_z"] == 0 and first["actor/flowrl/reference_kl"] == pytest.approx(0, abs=1e-6)
    expected = 15**2 * 7 / 8 * share_of_mixed_groups(whole.out.with_name("dumps") / "1.jsonl")
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
    assert steps[2]["actor/flowrl/log_z"] != 0 and "delta_std" in whole.shown

    summary = whole.summary
    dtypes = summary["effective_dtypes"]
    assert dtypes["actor"]["compute"] == dtypes["ref"]["compute"] == dtypes["rollout"]["rollout"] == "float16"
    assert dtypes["actor"]["master"] == "float32" and dtypes["actor"]["loss_scaling"] is True

    # The head is saved in a separate file, not with the model.
    saved = whole.checkpoints / f"global_step_{FLOWRL_STEPS}"
    assert "actor/flowrl_partition.pt" in json.loads((saved / "manifest.json").read_text())["files"]
    weights = torch.load(saved / "actor" / "model_world_size_1_rank_0.pt", weights_only=False)
    with safe_open(ARITHMETIC / "model" / "model.safetensors", "pt") as model:
        assert weights.keys() == set(model.keys())
    head = torch.load(saved / "actor" / "flowrl_partition.pt")
    assert {tensor.dtype for tensor in head["head"].values()} == {torch.float32}
    assert {int(state["step"]) for state in head["optimizer"]["state"].values()} == {FLOWRL_STEPS}


@pytest.mark.e2e
def test_summary_reports_the_run_which_is_not_repeated(whole):
    summary = whole.summary
    assert (summary["recipe"], summary["release"], summary["precision"]) == ("flowrl", "0.9.1", "fp16")
    assert summary["steps"] == whole.metrics[-1]["step"] == FLOWRL_STEPS and summary["skipped_steps"] == 0
    assert 0.2 <= summary["reward_first"] <= 0.8
    assert 0 <= summary["k3_kl"] < 1e-4 and 0 < summary["rollout_probs_diff_mean"] < 1e-2
    assert summary["patch_stamp"]["release"] == "0.9.1"
    assert {"wall_s", "peak_memory_gib", "versions", "reward_last", "loss_scale"} <= summary.keys()
    assert f"compare --runs=fp16={whole.out}" in whole.shown

    by_hand = {name: value for name, value in os.environ.items() if name != MADE}
    refusal = subprocess.run(whole.process.args, env=by_hand, capture_output=True, text=True)
    assert refusal.returncode == 1 and refusal.stderr.startswith(f"verl-precision run: --steps {FLOWRL_STEPS}: ")
    assert refusal.stdout + refusal.stderr == refusal.stderr and refusal.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.e2e
def test_resumed_step_is_bit_exact(whole, tmp_path):
    """Model, Adam, head, its Adam, loss scale, RNG and data of the last step, resumed after the one before."""
    before, last = f"global_step_{FLOWRL_STEPS - 1}", f"global_step_{FLOWRL_STEPS}"
    resumed = tmp_path / "checkpoints"
    shutil.copytree(whole.checkpoints / before, resumed / before)
    (resumed / "latest_checkpointed_iteration.txt").write_text(str(FLOWRL_STEPS - 1))
    replays = f"+rollouts=replay rollouts.file={whole.out.with_name('rollouts.sqlite')}"
    overrides = [*FLOWRL, replays, f"trainer.default_local_dir={resumed}"]
    rest = start_run(tmp_path / "rest", FLOWRL_STEPS, overrides, "RECIPE=flowrl")
    rest.finish()
    # Model, optimizer, extra state and head of the actor, and the data loader's.
    assert_same_checkpoint(whole.checkpoints / last, resumed / last, files=5)
    ((step, metrics),) = training_metrics(rest.out).items()
    wanted = training_metrics(whole.out)[FLOWRL_STEPS]
    checked_first = {"training/weight_sync_diff", "training/weight_sync_spread"}  # each run checks its first step
    assert step == FLOWRL_STEPS and metrics.keys() - wanted.keys() == checked_first
    assert {name: metrics.get(name) for name in wanted} == wanted
