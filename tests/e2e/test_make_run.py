"""The sanity task end to end, as ``make run`` starts it: Ray, FSDP and vLLM; asked by the doctor, interrupted, then
taken up again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import of_this_run, shared_memory

from lib.paths import REPO

SETTINGS = [
    "DEVICE=cpu",
    "EXPERIMENT=arithmetic",
    # A small batch, every step saved, and a loss scale that doubles at every step that is not skipped.
    "ARGS=data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 trainer.save_freq=1"
    " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64"
    " actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64"
    " actor_rollout_ref.actor.fsdp_config.grad_scaler.init_scale=1024"
    " actor_rollout_ref.actor.fsdp_config.grad_scaler.growth_interval=1",
]


def start(out: Path, steps: int, output) -> subprocess.Popen:
    words = [sys.executable, REPO / "scripts" / "run.py", f"OUT={out}", f"STEPS={steps}", *SETTINGS]
    return subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, text=True)


def read_jsonl(out: Path) -> list[dict]:
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ask(running: list[psutil.Process]) -> dict:
    """What ``doctor --live`` says of the job of these processes, and of the config that it was started with."""
    words = [word for process in running for word in process.cmdline() if word.startswith("--gcs-address=")]
    environment = os.environ | {"RAY_ADDRESS": words[0].partition("=")[2], "RAY_AUTH_MODE": "token"}
    config = ["+precision=fp16", "actor_rollout_ref.actor.fsdp_config.grad_scaler.init_scale=1024"]
    command = [sys.executable, REPO / "scripts" / "doctor.py", "--live", "--json", *config]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


@pytest.mark.e2e
def test_train_interrupt_resume(tmp_path):
    out, screen = tmp_path / "run", tmp_path / "screen.txt"
    with screen.open("w") as output:
        first = start(out, 1000, output)  # more than it takes while the doctor looks, on any machine
        while len(read_jsonl(out)) < 2 and first.poll() is None:
            time.sleep(0.2)
        running = of_this_run(out)
        niceness, mapped = {process.nice() for process in running}, shared_memory(running)
        asked_at, asked = len(read_jsonl(out)), ask(running)
        while len(read_jsonl(out)) < asked_at + 2 and first.poll() is None:  # it goes on as if nobody had asked
            time.sleep(0.2)
        first.send_signal(signal.SIGINT)
        assert first.wait() == 130, screen.read_text()
    assert asked["verdict"] == "agree" and asked["findings"] == [], asked
    assert {asked["hops"][hop] for hop in ("actor.compute", "actor.autocast", "rollout.weights")} == {"float16"}
    assert {asked["hops"][hop] for hop in ("actor.master", "actor.optimizer", "actor.reduce")} == {"float32"}
    assert asked["scaler"]["actor"]["growth_interval"] == 1 and asked["scaler"]["actor"]["scale"] >= 2048
    assert len(running) > 5, "Ray, the trainer and vLLM run in processes of their own"
    assert niceness == {psutil.Process().nice()}, "beside other programs they get their share"
    assert of_this_run(out) == []
    assert mapped and not any(file.exists() for file in mapped), "interrupted"

    saved = int((out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert f"resumes after step {saved}" in screen.read_text()
    with screen.open("w") as output:
        second, mapped = start(out, saved + 1, output), set()
        while second.poll() is None:
            mapped |= shared_memory(of_this_run(out))
            time.sleep(1)
    assert second.returncode == 0, screen.read_text()
    assert mapped and not any(file.exists() for file in mapped), "a clean end"
    shown = screen.read_text()
    assert f"resuming after step {saved} of {saved + 1} steps" in shown
    assert of_this_run(out) == []

    steps = [row["step"] for row in read_jsonl(out)]
    assert steps == sorted(set(steps)) and steps[-1] == saved + 1
    scales = {row["step"]: row["data"]["actor/loss_scale"] for row in read_jsonl(out)}
    # It doubles until it overflows, after twenty steps or so: how many there are depends on how long the doctor takes.
    assert scales[saved] >= 2**14 and scales[1] == 2048
    changes = [scales[after] / scales[before] for before, after in zip(steps, steps[1:], strict=False)]
    assert set(changes) <= {2.0, 0.5}, f"the loss scale was not restored: {scales}"

    summary = json.loads((out / "summary.json").read_text())
    assert (summary["release"], summary["precision"], summary["algo"]) == ("0.9.1", "fp16", "grpo")
    assert summary["steps"] == saved + 1 and summary["skipped_steps"] == changes.count(0.5)
    assert 0.2 <= summary["reward_first"] <= 0.8
    assert 0 <= summary["k3_kl"] < 1e-4 and 0 < summary["rollout_probs_diff_mean"] < 1e-2
    assert summary["effective_dtypes"]["actor"]["compute"] == "float16"
    assert summary["effective_dtypes"]["actor"]["master"] == "float32"
    assert summary["effective_dtypes"]["actor"]["loss_scaling"] is True
    assert summary["effective_dtypes"]["rollout"]["rollout"] == "float16"
    assert summary["patch_stamp"]["release"] == "0.9.1"
    assert {"wall_s", "peak_memory_gib", "versions", "reward_last", "loss_scale"} <= summary.keys()
    assert (out / "curves.png").stat().st_size > 10_000
    assert str(out / "curves.png") in shown

    again = start(out, saved + 1, subprocess.PIPE)
    refusal = again.communicate()[0]
    assert again.returncode == 1 and refusal.startswith(f"run: STEPS={saved + 1}: ") and refusal.count("\n") == 1
