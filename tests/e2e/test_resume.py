"""N uninterrupted steps equal k steps, SIGKILL, a resumed run, SIGKILL during a save, and the rest, bit for bit.

The job is that of ``make run ALGO=ppo``, with a critic; its first run records its rollouts, the second replays them.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import assert_same_checkpoint, training_metrics
from processes import kill, of_this_run, wait_for
from small_runs import ACTOR, HANGS_S, ROLLOUT, start_run

STEPS = 6
OVERRIDES = [
    # Three steps an epoch, so that the data is reshuffled in between.
    "data.train_batch_size=8 data.train_max_samples=24",
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


def start(out: Path, rollouts: str, screen: Path) -> subprocess.Popen:
    return start_run(out, STEPS, [*OVERRIDES, rollouts], "ALGO=ppo", screen=screen)


def kill_when(condition: Callable[[], bool], run: subprocess.Popen, out: Path, screen: Path) -> None:
    """Kill every process of a run as soon as the condition is met."""
    wait_for(condition, run, screen, HANGS_S)
    run.send_signal(signal.SIGSTOP)  # else it would clean up after verl's end
    while left := of_this_run(out):
        kill(left)
    run.kill()
    run.wait()


def wall_s(file: Path) -> float:
    return json.loads(file.read_text())["wall_s"]


@pytest.mark.e2e
def test_killed_and_resumed_equals_one_go_bit_for_bit(tmp_path):
    whole, parts, screen = tmp_path / "whole", tmp_path / "parts", tmp_path / "screen.txt"
    rollouts = tmp_path / "rollouts.sqlite"
    assert start(whole, f"+rollouts=record rollouts.file={rollouts}", screen).wait() == 0, screen.read_text()

    replay, checkpoints = f"+rollouts=replay rollouts.file={rollouts}", parts / "checkpoints"
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    run = start(parts, replay, screen)  # killed between steps, and between epochs
    kill_when(lambda: tracker.exists() and tracker.read_text() == "3", run, parts, screen)
    took = [wall_s(parts / "run.json")]

    torn = checkpoints / "global_step_5" / "critic" / "optim_world_size_1_rank_0.pt"
    torn.parent.mkdir(parents=True)
    os.mkfifo(torn)  # opening a FIFO for writing blocks: the save stops here
    run = start(parts, replay, screen)
    kill_when(torn.with_name("model_world_size_1_rank_0.pt").exists, run, parts, screen)
    assert "resuming after step 3" in screen.read_text() and tracker.read_text() == "4"
    took.append(wall_s(parts / "run.json"))
    torn.unlink()
    tracker.write_text("5")  # possible after a crash of the machine: files reach the disk in any order

    assert start(parts, replay, screen).wait() == 0, screen.read_text()
    assert "resuming after step 4" in screen.read_text()
    took.append(wall_s(parts / "summary.json"))
    assert 0 < took[0] < took[1] < took[2], "the time of killed attempts must count"
    assert "global_step_5 is torn: its save was not finished" in (parts / "train.log").read_text()

    left = {path.parents[1].name for path in (whole / "checkpoints").glob("*/*/model_world_size_*.pt")}
    assert left == {f"global_step_{STEPS}"}, "only one checkpoint should be kept"

    # Model, optimizer and extra state of actor and critic, and the data loader's.
    assert_same_checkpoint(*(out / "checkpoints" / f"global_step_{STEPS}" for out in (whole, parts)), files=7)

    one, other = training_metrics(whole), training_metrics(parts)
    assert set(other) >= {1, 2, 5, 6}, "only steps in which the run was killed may lack metrics"
    for step in other:
        assert {name for name in one[step] if one[step][name] != other[step].get(name)} == set(), step
    for role in ("actor", "critic"):
        assert sum(row[f"{role}/skipped_steps"] for row in one.values()) >= 2, "nothing overflowed"
        assert len({row[f"{role}/loss_scale"] for row in one.values()}) > 1, "the scale never grew"
