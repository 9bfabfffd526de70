"""verl's asynchronous v1 trainers in fp16: which part of the mismatch is precision, which comes from older weights.

A run of theirs resumes after it was killed, and ends with the cause when one side dies.
"""

from pathlib import Path

import pytest
from release_jobs import overrides, prepare_task, run_job
from small_runs import ACTOR, LORA, MODEL, ROLLOUT, SCALER, SMALL_ENGINE, Run, start_run

from verl_precision.patch.apply import apply
from verl_precision.patch.wheels import unpacked_wheel
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


def settings_of(mode: str) -> list[str]:
    return [f"trainer.v1.trainer_mode={mode}", *BOTH, *MODES[mode]]


def start(mode: str, out: Path, *overrides: str) -> Run:
    return start_run(out, 3, [*settings_of(mode), *overrides], "PRECISION=fp16")


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
def test_trainers_of_0_9_0_train_in_fp16(mode, tmp_path):
    tree = unpacked_wheel("0.9.0", tmp_path / "tree")
    apply(tree, fixes=False)
    groups = ["+algo=grpo", "+precision=fp16", *" ".join(settings_of(mode)).split()]
    words = overrides("0.9.0", prepare_task(), tmp_path, 2, groups)
    metrics, lines = run_job("0.9.0", tree, words, tmp_path, mode)
    k3 = metrics["rollout_corr/k3_kl"]
    assert metrics["training/off_policy/trajectory_staleness/max"] == [0, 1]
    assert 0 < k3[0] < 1e-6 < 1e-5 < k3[1]
    roles = {report["role"]: report for report in reports(lines)}
    assert (roles["actor"]["compute"], roles["rollout"]["rollout"]) == ("float16", "float16")


@pytest.mark.parametrize(("mode", "merge"), [("colocate_async", "false"), ("separate_async", "true")])
def test_killed_lora_run_resumes_with_the_saved_weights_and_loss_scale(mode, merge, tmp_path):
    """It begins with answers that the queue had when it was saved: the weight sync check leaves them out."""
    scale = f"{SCALER}.init_scale=1024 {SCALER}.growth_interval=1"  # doubles at every update
    settings = [*LORA, f"{MODEL}.lora.merge={merge}", scale, "trainer.save_freq=1"]
    run = start(mode, tmp_path / "run", *settings)
    run.kill_when(lambda: run.last_saved)
    run = start(mode, tmp_path / "run", *settings)
    run.finish()
    rows = {row["step"]: row["data"] for row in run.metrics}
    assert list(rows)[-2:] == [2, 3]
    assert {step: row["actor/loss_scale"] for step, row in rows.items()} == {step: 1024 * 2**step for step in rows}
    staleness = {step: row["training/off_policy/trajectory_staleness/max"] for step, row in rows.items()}
    assert (staleness[2], staleness[3]) == (1, 0)
    current = {step for step in rows if staleness[step] == 0}
    assert current == {step for step, row in rows.items() if "training/weight_sync_diff" in row}
    assert all(0 < rows[step]["rollout_corr/k3_kl"] < 1e-5 for step in current)


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
