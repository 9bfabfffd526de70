"""A LoRA trained in fp16 by ``make run`` on a CPU: as an adapter beside the weights, and merged into them."""

import json
import subprocess
import sys

import pytest

from lib.paths import REPO

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
LORA = (
    f"{MODEL}.lora_rank=8 {MODEL}.target_modules=all-linear"
    # In two steps the policy moves far from the base model: a rollout without the adapter would show it.
    f" {ACTOR}.optim.lr=1e-2"
    f" data.train_batch_size=8 {ACTOR}.ppo_mini_batch_size=8 {ACTOR}.ppo_micro_batch_size_per_gpu=64"
    f" {ROLLOUT}.log_prob_micro_batch_size_per_gpu=64"
)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("strategy", "merge"),
    [
        ("fsdp", "false"),
        pytest.param("fsdp2", "false", marks=pytest.mark.slow),
        pytest.param("fsdp2", "true", marks=pytest.mark.slow),
    ],
)
def test_a_lora_trains_in_fp16(strategy, merge, tmp_path):
    args = f"ARGS={LORA} {ACTOR}.strategy={strategy} {MODEL}.lora.merge={merge}"
    command = [sys.executable, REPO / "scripts" / "run.py", "DEVICE=cpu", "STEPS=3", f"OUT={tmp_path}", args]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr

    rows = [json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/global_step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 < row["training/rollout_probs_diff_mean"] < 1e-3
        assert 0 <= row["rollout_corr/k3_kl"] < 1e-5
    dtypes = json.loads((tmp_path / "summary.json").read_text())["effective_dtypes"]
    assert dtypes["actor"]["strategy"] == strategy and dtypes["actor"]["loss_scaling"] is True
    assert (dtypes["actor"]["compute"], dtypes["actor"]["master"]) == ("float16", "float32")
    assert (dtypes["rollout"]["wire"], dtypes["rollout"]["rollout"]) == ("float32", "float16")
