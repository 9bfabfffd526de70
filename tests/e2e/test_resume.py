"""``make run ALGO=ppo``: a run that is diagnosed, interrupted, killed and resumed equals one in one go, bit for bit.

The first run records its rollouts, the others replay them. Steps that need a busy or an idle job wait for its files.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from checkpoints import assert_same_checkpoint, training_metrics
from processes import kill, of_this_run, shared_memory, wait_for
from small_runs import ACTOR, HANGS_S, ROLLOUT, SCALER, finish_run, start_run

from lib.files import read_jsonl
from lib.paths import REPO

STEPS, EPOCH = 9, 3
OVERRIDES = [
    # The data is reshuffled for every epoch.
    f"data.train_batch_size=8 data.train_max_samples={8 * EPOCH}",
    f"{ROLLOUT}.n=4 {ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
    "trainer.max_actor_ckpt_to_keep=1 trainer.max_critic_ckpt_to_keep=1",
]
for role, scaler in ((ACTOR, "fsdp_config.grad_scaler"), ("critic", "fsdp.grad_scaler")):
    OVERRIDES += [
        # Two mini-batches a step, shuffled by the seed, and a learning rate that every step changes.
        f"{role}.ppo_mini_batch_size=4 {role}.ppo_micro_batch_size_per_gpu=16 {role}.shuffle=true",
        f"{role}.optim.lr_scheduler_type=cosine {role}.optim.lr_warmup_steps=3",
        # The first steps overflow, then the scale doubles after every third.
        f"{role}.{scaler}.init_scale={2.0**36} {role}.{scaler}.backoff_factor={2.0**-10}",
        f"{role}.{scaler}.growth_interval=3",
    ]


WORDS = "ALGO=ppo"


def start(out: Path, rollouts: str, screen: Path) -> subprocess.Popen:
    return start_run(out, STEPS, [*OVERRIDES, rollouts], WORDS, screen=screen)


def steps_logged(out: Path) -> int:
    return len(read_jsonl(out / "metrics.jsonl"))


def last_saved(out: Path) -> int:
    """Return the step of the last whole checkpoint; 0: there is none."""
    file = out / "checkpoints/latest_checkpointed_iteration.txt"
    return int(file.read_text()) if file.exists() else 0


def diagnose_live(running: list[psutil.Process]) -> dict:
    """Return the report of ``doctor --live`` on the job of these processes, whose trainer makes no call meanwhile."""
    words = [word for process in running for word in process.cmdline() if word.startswith("--gcs-address=")]
    environment = os.environ | {"RAY_ADDRESS": words[0].partition("=")[2], "RAY_AUTH_MODE": "token"}
    config = ["+precision=fp16", "algorithm.adv_estimator=gae", f"{SCALER}.init_scale={2.0**36}"]
    command = [sys.executable, REPO / "scripts/doctor.py", "--live", "--json", *config]
    (trainer,) = (process for process in running if "TaskRunner" in process.cmdline()[0])
    trainer.suspend()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS_S)
    finally:
        trainer.resume()
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


def kill_when(condition: Callable[[], bool], run: subprocess.Popen, out: Path, screen: Path) -> None:
    """Kill every process of a run as soon as the condition holds."""
    wait_for(condition, run, screen, HANGS_S)
    run.send_signal(signal.SIGSTOP)  # or it would tidy up after verl's end
    while left := of_this_run(out):
        kill(left)
    run.kill()
    run.wait()


def wall_s(file: Path) -> float:
    return json.loads(file.read_text())["wall_s"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def rollouts(folder) -> Path:
    return folder / "rollouts.sqlite"


@pytest.fixture(scope="module")
def whole(folder, rollouts) -> tuple[Path, str]:
    """A run in one go, and what it printed."""
    out, screen, mapped = folder / "whole", folder / "whole.txt", set()
    run = start(out, f"+rollouts=record rollouts.file={rollouts}", screen)

    def ended() -> bool:
        mapped.update(shared_memory(of_this_run(out)))
        return run.poll() is not None

    while not ended():
        try:
            run.wait(1)
        except subprocess.TimeoutExpired:
            continue
    assert run.returncode == 0, screen.read_text()
    assert of_this_run(out) == [] and mapped and not any(file.exists() for file in mapped), "a clean end"
    return out, screen.read_text()


@pytest.fixture(scope="module")
def parts(folder, rollouts, whole) -> tuple[Path, dict]:
    """The same run in three attempts: diagnosed and interrupted, killed while it saves, resumed; and the diagnosis."""
    out, screen = folder / "parts", folder / "parts.txt"
    replay, checkpoints, took = f"+rollouts=replay rollouts.file={rollouts}", out / "checkpoints", []

    run = start(out, replay, screen)
    wait_for(lambda: steps_logged(out) >= 2, run, screen, HANGS_S)
    running = of_this_run(out)
    niceness, mapped = {process.nice() for process in running}, shared_memory(running)
    before, diagnosis = steps_logged(out), diagnose_live(running)
    wait_for(lambda: steps_logged(out) > before, run, screen, HANGS_S)  # it survived the diagnosis
    run.send_signal(signal.SIGINT)
    assert run.wait(HANGS_S) == 130, screen.read_text()
    assert len(running) > 5, "Ray, the trainer and vLLM run in processes of their own"
    assert niceness == {psutil.Process().nice()}, "the run must keep its parent's niceness"
    assert of_this_run(out) == [] and mapped and not any(file.exists() for file in mapped), "interrupted"
    saved = last_saved(out)
    assert f"resumes after step {saved}" in screen.read_text()
    took.append(wall_s(out / "run.json"))

    good = saved // EPOCH * EPOCH + EPOCH  # resumed between two epochs
    step = good + 1
    assert step < STEPS, "the first attempt took too many steps for what follows"
    torn = checkpoints / f"global_step_{step}" / "critic" / "optim_world_size_1_rank_0.pt"
    torn.parent.mkdir(parents=True)
    os.mkfifo(torn)  # writing to it waits for a reader: the save stops here
    run = start(out, replay, screen)
    kill_when(torn.with_name("model_world_size_1_rank_0.pt").exists, run, out, screen)
    assert f"resuming after step {saved} of" in screen.read_text() and last_saved(out) == good
    took.append(wall_s(out / "run.json"))
    torn.unlink()
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(step))  # as a crash may leave it

    assert start(out, replay, screen).wait(HANGS_S) == 0, screen.read_text()
    assert f"resuming after step {good} of" in screen.read_text()
    took.append(wall_s(out / "summary.json"))
    assert 0 < took[0] < took[1] < took[2], "an attempt that was killed counts, too"
    assert f"global_step_{step} is torn: its save was not finished" in (out / "train.log").read_text()
    return out, diagnosis


@pytest.mark.e2e
def test_resumed_run_equals_one_go_bit_for_bit(whole, parts):
    (whole, _), (parts, _) = whole, parts
    left = {path.parents[1].name for path in (whole / "checkpoints").glob("*/*/model_world_size_*.pt")}
    assert left == {f"global_step_{STEPS}"}, "one checkpoint was to be kept"
    # Model, optimizer and extra state of actor and critic, and the data loader's.
    assert_same_checkpoint(*(out / "checkpoints" / f"global_step_{STEPS}" for out in (whole, parts)), files=7)

    one, other = training_metrics(whole), training_metrics(parts)
    assert set(one) == set(range(1, STEPS + 1))
    assert len(set(one) - set(other)) <= 1, "only the step in which the run was killed may lack its metrics"
    for step in other:
        assert {name for name in one[step] if one[step][name] != other[step].get(name)} == set(), step
    for role in ("actor", "critic"):
        assert sum(row[f"{role}/skipped_steps"] for row in one.values()) >= 2, "nothing overflowed"
        assert len({row[f"{role}/loss_scale"] for row in one.values()}) > 1, "the scale never grew"


@pytest.mark.e2e
def test_doctor_reports_the_dtypes_of_the_running_job(parts):
    _, diagnosis = parts
    assert diagnosis["verdict"] == "agree" and diagnosis["findings"] == [], diagnosis
    hops = diagnosis["hops"]
    assert {hops[hop] for hop in ("actor.compute", "actor.autocast", "rollout.weights")} == {"float16"}
    assert {hops[hop] for hop in ("actor.master", "actor.optimizer", "actor.reduce")} == {"float32"}
    scaler = diagnosis["scaler"]["actor"]
    assert scaler["growth_interval"] == 3 and scaler["backoff_factor"] == 2.0**-10 and scaler["scale"] < 2.0**36


@pytest.mark.e2e
def test_summary_reports_the_run(whole):
    out, shown = whole
    summary, rows = json.loads((out / "summary.json").read_text()), read_jsonl(out / "metrics.jsonl")
    assert (summary["release"], summary["precision"], summary["algo"]) == ("0.9.1", "fp16", "ppo")
    assert summary["steps"] == STEPS and [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert summary["skipped_steps"] == sum(row["data"]["actor/skipped_steps"] for row in rows)
    assert 0.2 <= summary["reward_first"] <= 0.8
    assert 0 <= summary["k3_kl"] < 1e-4 and 0 < summary["rollout_probs_diff_mean"] < 1e-2
    for role in ("actor", "critic"):
        dtypes = summary["effective_dtypes"][role]
        assert (dtypes["compute"], dtypes["master"], dtypes["loss_scaling"]) == ("float16", "float32", True)
    assert summary["effective_dtypes"]["rollout"]["rollout"] == "float16"
    assert summary["patch_stamp"]["release"] == "0.9.1"
    assert {"wall_s", "peak_memory_gib", "versions", "reward_last", "loss_scale"} <= summary.keys()
    assert (out / "curves.png").stat().st_size > 10_000
    assert str(out / "curves.png") in shown


@pytest.mark.e2e
def test_finished_run_is_not_repeated(whole, rollouts):
    out, _ = whole
    overrides = [*OVERRIDES, f"+rollouts=record rollouts.file={rollouts}"]
    code, refusal = finish_run(out, STEPS, overrides, WORDS)
    assert code == 1 and refusal.startswith(f"run: STEPS={STEPS}: ") and refusal.count("\n") == 1
