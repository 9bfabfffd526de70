"""verl's asynchronous v1 trainers in fp16: which part of the mismatch is precision, which comes from older weights."""

import pytest
from small_runs import ACTOR, ROLLOUT, SMALL_ENGINE, start_run

from verl_precision.run.log import reports

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("exclusive")]
ENGINE = f"{ROLLOUT}.checkpoint_engine"
BOTH = [
    "data.train_batch_size=16",
    f"{ACTOR}.ppo_mini_batch_size=16",
    SMALL_ENGINE,
]
MODES = {
    "colocate_async": [],
    "separate_async": [
        "trainer.v1.separate_async.parameter_sync_step=1",
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node=1",
        f"{ENGINE}.backend=file",
        f"{ENGINE}.custom_backend_module=recipes.cpu.checkpoint_engine",
        "ray_kwargs.ray_init.num_gpus=2",
        "ray_kwargs.ray_init.num_cpus=64",
    ],
}


@pytest.mark.parametrize("mode", MODES)
def test_answers_of_older_weights_mismatch_far_more_than_fp16(mode, tmp_path):
    run = start_run(tmp_path / "run", 3, [f"trainer.v1.trainer_mode={mode}", *BOTH, *MODES[mode]], "PRECISION=fp16")
    run.finish()
    k3 = {True: [], False: []}  # by whether an answer is of older weights
    rows = [row["data"] for row in run.metrics]
    for row in rows:
        k3[row["training/off_policy/trajectory_staleness/max"] > 0].append(row["rollout_corr/k3_kl"])
    assert 0 < max(k3[False]) < 1e-6 < 1e-5 < min(k3[True])
    first = rows[0]
    assert first["training/weight_sync_diff"] < 2e-3 < first["training/weight_sync_spread"]
    roles = {report["role"]: report for report in reports((run.out / "train.log").read_text().splitlines())}
    assert (roles["actor"]["compute"], roles["actor"]["master"]) == ("float16", "float32")
    assert roles["rollout"]["rollout"] == "float16"
