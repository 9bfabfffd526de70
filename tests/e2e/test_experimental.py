"""The trainers under verl.experimental train in fp16 with a rollout that has its own worker, and measure the mismatch.

They train in bypass mode. The weights travel by ``recipes.cpu.checkpoint_engine``.
"""

import sys

import pytest
from processes import run_to_end
from small_runs import MODEL, ROLLOUT, SMALL_ENGINE, small_batch

from verl_precision.files import read_jsonl
from verl_precision.paths import CONFIGS, REPO
from verl_precision.run.job import CPU_PLATFORM
from verl_precision.run.log import reports

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("exclusive")]
ENGINE = f"{ROLLOUT}.checkpoint_engine"
OVERRIDES = [
    f"hydra.searchpath=[pkg://verl.trainer.config,file://{CONFIGS}]",
    "+experiment=arithmetic +algo=grpo +device=cpu +precision=fp16",
    f"{ENGINE}.backend=file {ENGINE}.custom_backend_module=recipes.cpu.checkpoint_engine",
    "actor_rollout_ref.hybrid_engine=false rollout.n_gpus_per_node=1",
    "ray_kwargs.ray_init.num_gpus=2 ray_kwargs.ray_init.num_cpus=64",  # two of its actors claim ten
    "trainer.mismatch_freq=1 trainer.logger=[file] trainer.save_freq=-1 trainer.test_freq=-1 trainer.total_epochs=9",
    SMALL_ENGINE,
]
ONE_STEP_OFF = "trainer.total_training_steps=3"
FULLY_ASYNC = [
    "data.train_batch_size=0 data.gen_batch_size=1 rollout.total_rollout_steps=32",
    "async_training.trigger_parameter_sync_step=2",
]


@pytest.mark.parametrize(
    ("program", "overrides", "updates"),
    [
        ("one_step_off_policy.main_ppo", [*small_batch(), ONE_STEP_OFF], 3),
        ("fully_async_policy.fully_async_main", [*small_batch(), *FULLY_ASYNC], 2),  # a row for each weight sync
    ],
)
def test_experimental_trainer_measures_the_mismatch(program, overrides, updates, generated, tmp_path):
    """The first update has the rollout's weights, the last one newer ones."""
    words = [
        *" ".join([*OVERRIDES, *overrides]).split(),
        f"{MODEL}.path={generated}/model",
        f"data.train_files={generated}/train.parquet",
        f"data.val_files={generated}/val.parquet",
        f"hydra.run.dir={tmp_path}",
    ]
    environment = CPU_PLATFORM | {
        "PYTHONPATH": str(REPO),
        "RAY_DEDUP_LOGS": "0",  # else Ray drops the workers' lines, which differ only in the rank
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", f"verl.experimental.{program}", *words]
    lines = run_to_end(command, environment, tmp_path, tmp_path / "train.log")
    rows = [row["data"] for row in read_jsonl(tmp_path / "verl.jsonl") if "rollout_corr/k3_kl" in row["data"]]
    assert len(rows) == updates
    assert 0 < rows[0]["rollout_corr/k3_kl"] < 1e-5 < rows[-1]["rollout_corr/k3_kl"]
    assert 0 < rows[0]["training/rollout_logprobs_equal_share"] < 1
    assert rows[0]["training/weight_sync_diff"] < 2e-3 < rows[0]["training/weight_sync_spread"]
    roles = {report["role"]: report for report in reports(lines)}
    assert (roles["actor"]["compute"], roles["actor"]["master"]) == ("float16", "float32")
    assert roles["rollout"]["rollout"] == "float16"
