"""N steps in one go equal k steps, SIGKILL, a resumed run, SIGKILL in the midst of saving, and the rest, bit for bit.

The job is that of ``make run ALGO=ppo``, with a critic; its first run records its rollouts, the second replays them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import kill, of_this_run

REPO = Path(__file__).resolve().parents[2]
STEPS = 6
HANGS_S = 1800
ARGS = [
    # Three steps an epoch, so that the data is shuffled anew in between.
    "data.train_batch_size=8 data.train_max_samples=24",
    "actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
    "trainer.max_actor_ckpt_to_keep=1 trainer.max_critic_ckpt_to_keep=1",
]
for role, scaler in (("actor_rollout_ref.actor", "fsdp_config.grad_scaler"), ("critic", "fsdp.grad_scaler")):
    ARGS += [
        # Two mini-batches a step, shuffled by the seed, and a learning rate that every step changes.
        f"{role}.ppo_mini_batch_size=4 {role}.ppo_micro_batch_size_per_gpu=16 {role}.shuffle=true",
        f"{role}.optim.lr_scheduler_type=cosine {role}.optim.lr_warmup_steps=3",
        # The first steps overflow, then the scale doubles after every third.
        f"{role}.{scaler}.init_scale={2.0**36} {role}.{scaler}.backoff_factor={2.0**-10}",
        f"{role}.{scaler}.growth_interval=3",
    ]


def start(out: Path, rollouts: str, screen: Path) -> subprocess.Popen:
    settings = ["DEVICE=cpu", "EXPERIMENT=arithmetic", "ALGO=ppo", f"STEPS={STEPS}", f"OUT={out}"]
    words = [sys.executable, REPO / "scripts" / "run.py", *settings, f"ARGS={' '.join([*ARGS, rollouts])}"]
    with screen.open("w") as output:
        return subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)


def kill_when(condition: Callable[[], bool], run: subprocess.Popen, out: Path, screen: Path) -> None:
    """SIGKILL to every process of a run, as soon as the condition holds."""
    begin = time.monotonic()
    while not condition():
        assert run.poll() is None and time.monotonic() - begin < HANGS_S, screen.read_text()
        time.sleep(0.02)
    run.send_signal(signal.SIGSTOP)  # or it would tidy up after verl's end
    while left := of_this_run(out):
        kill(left)
    run.kill()
    run.wait()


def wall_s(file: Path) -> float:
    return json.loads(file.read_text())["wall_s"]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All that a checkpoint's file holds, with the way to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield path, value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return one == other


def training(out: Path) -> dict[int, dict[str, float]]:
    """The metrics of every step, without those that measure time and memory."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    measured = re.compile("timing|perf/")
    return {row["step"]: {k: v for k, v in row["data"].items() if not measured.search(k)} for row in rows}


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
    os.mkfifo(torn)  # writing to it waits for a reader: the save stops here
    run = start(parts, replay, screen)
    kill_when(torn.with_name("model_world_size_1_rank_0.pt").exists, run, parts, screen)
    assert "resuming after step 3" in screen.read_text() and tracker.read_text() == "4"
    took.append(wall_s(parts / "run.json"))
    torn.unlink()
    tracker.write_text("5")  # as a machine's crash may leave it: files reach the disk in any order

    assert start(parts, replay, screen).wait() == 0, screen.read_text()
    assert "resuming after step 4" in screen.read_text()
    took.append(wall_s(parts / "summary.json"))
    assert 0 < took[0] < took[1] < took[2], "an attempt that was killed counts, too"
    assert "global_step_5 is torn: its save was not finished" in (parts / "train.log").read_text()

    left = {path.parents[1].name for path in (whole / "checkpoints").glob("*/*/model_world_size_*.pt")}
    assert left == {f"global_step_{STEPS}"}, "one checkpoint was to be kept"

    expected, found = (out / "checkpoints" / f"global_step_{STEPS}" for out in (whole, parts))
    files = sorted(path.relative_to(expected) for path in expected.rglob("*.pt"))
    assert files == sorted(path.relative_to(found) for path in found.rglob("*.pt"))
    assert len(files) == 7, "model, optimizer and extra state of actor and critic, and the data loader's"
    for file in files:
        one, other = (dict(leaves(torch.load(out / file, weights_only=False))) for out in (expected, found))
        assert one.keys() == other.keys()
        assert [name for name in one if not same(one[name], other[name])] == [], file

    one, other = training(whole), training(parts)
    assert set(other) >= {1, 2, 5, 6}, "only steps in which the run was killed may lack theirs"
    for step in other:
        assert {name for name in one[step] if one[step][name] != other[step].get(name)} == set(), step
    for role in ("actor", "critic"):
        assert sum(row[f"{role}/skipped_steps"] for row in one.values()) >= 2, "nothing overflowed"
        assert len({row[f"{role}/loss_scale"] for row in one.values()}) > 1, "the scale never grew"
