"""verl's asynchronous v1 trainers in fp16: which part of the mismatch is precision, which comes from older weights.

A run of theirs resumes after it was killed, and ends with the cause when one side dies.
"""

from pathlib import Path

import pytest
from small_runs import ACTOR, ROLLOUT, SCALER, SMALL_ENGINE, Run, start_run

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


def start(mode: str, out: Path, *overrides: str) -> Run:
    return start_run(out, 3, [f"trainer.v1.trainer_mode={mode}", *BOTH, *MODES[mode], *overrides], "PRECISION=fp16")


@pytest.mark.parametrize("mode", MODES)
def test_answers_of_older_weights_mismatch_far_more_than_fp16(mode, tmp_path):
    run = start(mode, tmp_path / "run")
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


@pytest.mark.parametrize("mode", MODES)
def test_killed_run_resumes_with_the_saved_weights_and_loss_scale(mode, tmp_path):
    """Its first answers are of the restored weights: they differ from the trainer's by the rounding of fp16 only."""
    scale = f"{SCALER}.init_scale=1024 {SCALER}.growth_interval=1"  # doubles at every update
    run = start(mode, tmp_path / "run", scale, "trainer.save_freq=1")
    run.kill_when(lambda: run.last_saved)
    saved = run.last_saved
    run = start(mode, tmp_path / "run", scale, "trainer.save_freq=1")
    run.finish()
    rows = {row["step"]: row["data"] for row in run.metrics}
    assert list(rows) == [1, 2, 3]
    assert [rows[step]["actor/loss_scale"] for step in rows] == [1024, 2048, 4096]
    resumed = rows[saved + 1]
    assert resumed["training/off_policy/trajectory_staleness/max"] == 0
    assert 0 < resumed["rollout_corr/k3_kl"] < 1e-6
    assert resumed["training/weight_sync_diff"] < 2e-3 < resumed["training/weight_sync_spread"]


@pytest.mark.parametrize(
    ("side", "cause"), [("EngineCore", "vLLM's engine died"), ("WorkerDict", "WorkerDict")], ids=["rollout", "trainer"]
)
def test_run_that_loses_one_side_ends_with_the_cause(side, cause, tmp_path):
    run = start("separate_async", tmp_path / "run")
    run.wait_for(lambda: "starting the first step" in run.shown)
    killed = [process for process in run.processes if side in "".join(process.cmdline())]
    for process in killed:
        process.kill()
    shown = run.finish(code=1)
    assert killed and "failed after step 0 of 3, ended because" in shown and cause in shown
    assert run.processes == []
