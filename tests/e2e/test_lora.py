"""LoRA trained in fp16 by ``make run`` on a CPU, synced to the rollout as an adapter or merged into the weights."""

import json

import pytest
from small_runs import ACTOR, MODEL, finish_run, small_batch

from lib.files import read_jsonl

LORA = [
    f"{MODEL}.lora_rank=8",
    f"{MODEL}.target_modules=all-linear",
    # In two steps the policy moves far from the base model, so a rollout without the adapter would be detected.
    f"{ACTOR}.optim.lr=1e-2",
]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "merge"), [("fsdp", "false"), ("fsdp2", "false"), ("fsdp2", "true")])
def test_lora_trains_in_fp16(strategy, merge, tmp_path):
    overrides = [*small_batch(), *LORA, f"{ACTOR}.strategy={strategy}", f"{MODEL}.lora.merge={merge}"]
    code, output = finish_run(tmp_path, 3, overrides)
    assert code == 0, output

    rows = [row["data"] for row in read_jsonl(tmp_path / "metrics.jsonl")]
    assert [row["training/global_step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 < row["training/rollout_probs_diff_mean"] < 1e-3
        assert 0 <= row["rollout_corr/k3_kl"] < 1e-5
    dtypes = json.loads((tmp_path / "summary.json").read_text())["effective_dtypes"]
    assert dtypes["actor"]["strategy"] == strategy and dtypes["actor"]["loss_scaling"] is True
    assert (dtypes["actor"]["compute"], dtypes["actor"]["master"]) == ("float16", "float32")
    assert (dtypes["rollout"]["wire"], dtypes["rollout"]["rollout"]) == ("float32", "float16")
