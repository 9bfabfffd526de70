"""``make run ALGO=ppo``: a run that is diagnosed, killed, resumed and interrupted equals an uninterrupted one bitwise.

The first run records its rollouts and goes on into a storm of overflows, the others replay them. All train in bypass
mode, on the rollout's log-probabilities; the others compute the trainer's in some steps, only for the metrics. Steps
that need a busy or an idle job wait for its files.
"""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from checkpoints import assert_same_checkpoint, training_metrics
from processes import shared_memory
from small_runs import ACTOR, ROLLOUT, SCALER, SMALL_ENGINE, Run, start_run
from support.waiting import TIMEOUT_S

from verl_precision.paths import PROGRAM
from verl_precision.run.log import reports
from verl_precision.run.summary import agreed, by_role

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # seven minutes

STEPS, EPOCH, MEASURED = 9, 3, 4
WORDS = "ALGO=ppo"
DETERMINISM = [
    "actor_rollout_ref.actor.fsdp_config.full_determinism=true",
    "critic.fsdp.full_determinism=true",
]  # of +rollouts
OVERRIDES = [
    # The data is reshuffled for every epoch.
    f"data.train_batch_size=8 data.train_max_samples={8 * EPOCH}",
    f"{ROLLOUT}.n=4 {ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
    # Every gradient of the actor overflows from 2^40 on, none at 2^10. The first step's two updates are skipped, the
    # next 16 taken; at the end of step 9 the scale grows so much that three more overflow, and the third is an error.
    f"{SCALER}.init_scale={2.0**70} {SCALER}.backoff_factor={2.0**-30} {SCALER}.max_consecutive_skips=3",
    f"{SCALER}.growth_interval={2 * (STEPS - 1)} {SCALER}.growth_factor={2.0**110}",
    f"critic.fsdp.grad_scaler.init_scale={2.0**36} critic.fsdp.grad_scaler.backoff_factor={2.0**-10}",
    "critic.fsdp.grad_scaler.growth_interval=3",
    "algorithm.rollout_correction.bypass_mode=true",
    SMALL_ENGINE,
]
for role in (ACTOR, "critic"):
    OVERRIDES += [
        # Two mini-batches a step, shuffled by the seed, and a learning rate that every step changes.
        f"{role}.ppo_mini_batch_size=4 {role}.ppo_micro_batch_size_per_gpu=16 {role}.shuffle=true",
        f"{role}.optim.lr_warmup_steps={2 * STEPS}",
    ]


def keeping(checkpoints: int) -> str:
    return f"trainer.max_actor_ckpt_to_keep={checkpoints} trainer.max_critic_ckpt_to_keep={checkpoints}"


def diagnose_live(running: list[psutil.Process]) -> dict:
    """Return the report of ``doctor --live`` on the job of these processes, whose trainer makes no call meanwhile."""
    words = [word for process in running for word in process.cmdline() if word.startswith("--gcs-address=")]
    environment = os.environ | {"RAY_ADDRESS": words[0].partition("=")[2], "RAY_AUTH_MODE": "token"}
    config = ["+precision=fp16", "algorithm.adv_estimator=gae", f"{SCALER}.init_scale={2.0**70}", *DETERMINISM]
    command = [*PROGRAM, "doctor", "--live", "--json", *config]
    (trainer,) = (process for process in running if "TaskRunner" in process.cmdline()[0])
    trainer.suspend()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    finally:
        trainer.resume()
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def whole(folder, exclusive) -> Run:
    """A run in one go, which ends in a storm of overflows in the second step after ``STEPS``."""
    records = f"+rollouts=record rollouts.file={folder}/rollouts.sqlite"
    run, mapped = start_run(folder / "whole", STEPS + 3, [*OVERRIDES, keeping(3), records], WORDS, "RETRIES=2"), set()
    while run.process.poll() is None:
        mapped.update(shared_memory(run.processes))
        try:
            run.process.wait(1)
        except subprocess.TimeoutExpired:
            continue
    run.finish(code=1)
    assert run.processes == [] and mapped and not any(file.exists() for file in mapped), "a clean end"
    return run


def block_save(run: Run, step: int) -> Path:
    """Make the save of a later step stop at the critic's optimizer, and return the file that is written before."""
    critic = run.checkpoints / f"global_step_{step}" / "critic"
    critic.mkdir(parents=True)
    os.mkfifo(critic / "optim_world_size_1_rank_0.pt")  # writing to it waits for a reader
    return critic / "model_world_size_1_rank_0.pt"


@pytest.fixture(scope="module")
def parts(folder, whole) -> tuple[Run, dict]:
    """The same run in two attempts, diagnosed and killed while it saves, resumed and interrupted; and the diagnosis."""
    replays = f"+rollouts=replay rollouts.file={folder}/rollouts.sqlite"
    measures = f"trainer.mismatch_freq={MEASURED}"
    words = [folder / "parts", STEPS + 3, [*OVERRIDES, keeping(1), replays, measures], WORDS]
    good = 2 * EPOCH  # resumed between two epochs
    run = start_run(*words)
    run.wait_for(lambda: run.last_saved > 1)  # the first step is skipped: Adam has no state yet
    written = block_save(run, good + 1)
    running = run.processes
    assert len(running) > 5, "Ray, the trainer and vLLM run in processes of their own"
    assert {process.nice() for process in running} == {psutil.Process().nice()}, "that of the run's parent"
    diagnosis = diagnose_live(running)
    run.kill_when(written.exists)
    assert run.last_saved == good
    killed_after = run.record["wall_s"]
    written.with_name("optim_world_size_1_rank_0.pt").unlink()
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text(str(good + 1))  # as a crash may leave it

    run = start_run(*words)
    run.wait_for(lambda: run.last_saved > good)
    run.wait_for(block_save(run, STEPS + 1).exists)
    mapped = shared_memory(run.processes)
    run.process.send_signal(signal.SIGINT)
    shown = run.finish(code=130)
    assert run.processes == [] and mapped and not any(file.exists() for file in mapped), "interrupted"
    assert f"resuming after step {good} of" in shown and f"resumes after step {STEPS}" in shown
    assert 0 < killed_after < run.record["wall_s"], "an attempt that was killed counts, too"
    assert f"global_step_{good + 1} is torn: its save was not finished" in (run.out / "train.log").read_text()
    return run, diagnosis


def test_resumed_run_equals_one_go_bit_for_bit(whole, parts):
    parts, _ = parts
    left = {path.parents[1].name for path in parts.checkpoints.glob("*/*/model_world_size_*.pt")}
    expected = {f"global_step_{step}" for step in (2 * EPOCH, STEPS, STEPS + 1)}
    assert left == expected, "one checkpoint of each attempt, and the one that was not finished"
    # Model, optimizer and extra state of actor and critic, and the data loader's.
    assert_same_checkpoint(*(run.checkpoints / f"global_step_{STEPS}" for run in (whole, parts)), files=7)

    one, other = training_metrics(whole.out), training_metrics(parts.out)
    assert set(range(1, STEPS + 1)) <= set(other) <= set(one) == set(range(1, STEPS + 2))
    for step in other:
        assert {name for name in one[step] if one[step][name] != other[step].get(name)} == set(), step
    # The first step of each attempt, and every fourth.
    measured = {step for step, row in other.items() if abs(row.get("rollout_corr/k3_kl", 1)) < 1e-4}
    assert measured & set(range(STEPS + 1)) == {1, MEASURED, 2 * EPOCH + 1, 2 * MEASURED}
    assert all(0 < other[step]["training/rollout_logprobs_equal_share"] < 1 for step in measured)
    assert all(0 < other[step]["training/weight_sync_diff"] < 1e-2 for step in (1, 2 * EPOCH + 1))
    assert not any("rollout_corr/k3_kl" in row or "training/weight_sync_diff" in row for row in one.values())
    for role in ("actor", "critic"):
        assert sum(row[f"{role}/skipped_steps"] for row in other.values()) >= 2, "nothing overflowed"
        assert len({row[f"{role}/loss_scale"] for row in other.values()}) > 1, "the scale never changed"
    assert one[STEPS]["actor/loss_scale"] == 2.0**120, "the scale never grew"


def test_doctor_reports_the_dtypes_of_the_running_job(parts):
    _, diagnosis = parts
    assert diagnosis["verdict"] == "agree" and diagnosis["findings"] == [], diagnosis
    hops = diagnosis["hops"]
    assert {hops[hop] for hop in ("actor.compute", "actor.autocast", "critic.compute", "rollout.weights")} == {
        "float16"
    }
    assert {hops[hop] for hop in ("actor.master", "actor.optimizer", "actor.reduce")} == {"float32"}
    scaler = diagnosis["scaler"]["actor"]
    assert scaler["growth_interval"] == 2 * (STEPS - 1)
    assert scaler["backoff_factor"] == 2.0**-30 and scaler["scale"] == 2.0**10


def test_workers_report_the_dtypes_of_both_roles(whole):
    roles = by_role(reports((whole.out / "train.log").read_text().splitlines()))
    for role in ("actor", "critic"):
        dtypes = agreed(roles[role])
        assert (dtypes["compute"], dtypes["master"], dtypes["loss_scaling"]) == ("float16", "float32", True)
    assert agreed(roles["rollout"])["rollout"] == "float16"


def actor_weights(checkpoints: Path, step: int) -> dict[str, torch.Tensor]:
    return torch.load(checkpoints / f"global_step_{step}/actor/model_world_size_1_rank_0.pt", weights_only=False)


def check_storm(run: Run, skips: int, scale: float, step: int) -> None:
    """Check the error and the last step's metrics of a run that ended at ``scale`` in the step after ``step``."""
    error = f"LossScaleError: {skips} optimizer steps in a row overflowed (grad_scaler.max_consecutive_skips)"
    assert error in run.shown and run.shown.count("\ntraining ") == 1, "an error of the job is not tried again"
    assert f"loss scale {scale:g}, first non-finite gradient: " in run.shown
    row = run.metrics[-1]
    assert row["step"] == step and row["data"]["actor/loss_scale"] == pytest.approx(scale)
    assert row["data"]["actor/skipped_steps"] == skips - 1 and "actor/grad_norm" not in row["data"]


def test_storm_leaves_a_checkpoint_of_the_unfinished_step(whole):
    check_storm(whole, skips=3, scale=2.0**60, step=STEPS + 1)
    saved = {int(folder.name.rpartition("_")[2]) for folder in whole.checkpoints.glob("global_step_*")}
    assert max(saved) == whole.last_saved == STEPS + 2
    # The actor's weights are those after the last step that was taken.
    weights = [actor_weights(whole.checkpoints, step) for step in (STEPS, STEPS + 2)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_other_trainer_resumes_from_the_storms_checkpoint(whole, tmp_path):
    """The steps up to its own storm are not to be saved, but the unfinished one is."""
    checkpoints, scale, last = tmp_path / "checkpoints", 1e29, STEPS + 2
    shutil.copytree(whole.checkpoints, checkpoints)
    saved = {folder.name for folder in checkpoints.glob("global_step_*")}
    storm = f"{SCALER}.init_scale={scale} {SCALER}.min_scale={scale} {SCALER}.max_consecutive_skips=3"
    trainer = f"trainer.use_v1=false trainer.default_local_dir={checkpoints} trainer.save_freq=-1"
    trainer += " trainer.mismatch_freq=1"
    run = start_run(tmp_path / "v0", last + 9, [*OVERRIDES, keeping(9), storm, trainer], WORDS, "RETRIES=2")
    run.finish(code=1)
    check_storm(run, skips=3, scale=scale, step=last + 1)
    assert 0 < run.metrics[-1]["data"]["training/rollout_logprobs_equal_share"] < 1
    assert {folder.name for folder in checkpoints.glob("global_step_*")} == saved | {f"global_step_{last + 2}"}
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(last + 2)
    # The actor's weights are unchanged: every step was skipped.
    weights = [actor_weights(checkpoints, step) for step in (last, last + 2)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    # It started from its own scale and count, not from those of the storm.
    assert f"contains no loss scale: starting at {scale:g}" in (run.out / "train.log").read_text()
