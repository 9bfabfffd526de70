"""The sanity task end to end, as ``make run`` starts it: Ray, FSDP and vLLM; diagnosed by the doctor, interrupted and
resumed."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from processes import of_this_run, shared_memory
from small_runs import SCALER, finish_run, small_batch, start_run

from lib.files import read_jsonl
from lib.paths import REPO

# Every step saved, and a loss scale that doubles at every step that is not skipped.
OVERRIDES = [*small_batch(), "trainer.save_freq=1", f"{SCALER}.init_scale=1024", f"{SCALER}.growth_interval=1"]


def diagnose_live(running: list[psutil.Process]) -> dict:
    """Return the report of ``doctor --live`` on the job of these processes and its config."""
    words = [word for process in running for word in process.cmdline() if word.startswith("--gcs-address=")]
    environment = os.environ | {"RAY_ADDRESS": words[0].partition("=")[2], "RAY_AUTH_MODE": "token"}
    config = ["+precision=fp16", f"{SCALER}.init_scale=1024"]
    command = [sys.executable, REPO / "scripts" / "doctor.py", "--live", "--json", *config]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


@pytest.mark.e2e
def test_train_interrupt_resume(tmp_path):
    out, screen = tmp_path / "run", tmp_path / "screen.txt"

    def steps_logged() -> int:
        return len(read_jsonl(out / "metrics.jsonl"))

    first = start_run(out, 1000, OVERRIDES, screen=screen)  # more steps than run during the diagnosis
    while steps_logged() < 2 and first.poll() is None:
        time.sleep(0.2)
    running = of_this_run(out)
    niceness, mapped = {process.nice() for process in running}, shared_memory(running)
    steps_before, diagnosis = steps_logged(), diagnose_live(running)
    while steps_logged() < steps_before + 2 and first.poll() is None:  # it must survive the diagnosis
        time.sleep(0.2)
    first.send_signal(signal.SIGINT)
    assert first.wait() == 130, screen.read_text()
    assert diagnosis["verdict"] == "agree" and diagnosis["findings"] == [], diagnosis
    assert {diagnosis["hops"][hop] for hop in ("actor.compute", "actor.autocast", "rollout.weights")} == {"float16"}
    assert {diagnosis["hops"][hop] for hop in ("actor.master", "actor.optimizer", "actor.reduce")} == {"float32"}
    assert diagnosis["scaler"]["actor"]["growth_interval"] == 1 and diagnosis["scaler"]["actor"]["scale"] >= 2048
    assert len(running) > 5, "Ray, the trainer and vLLM run in processes of their own"
    assert niceness == {psutil.Process().nice()}, "the run must keep its parent's niceness"
    assert of_this_run(out) == []
    assert mapped and not any(file.exists() for file in mapped), "interrupted"

    saved = int((out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert f"resumes after step {saved}" in screen.read_text()
    second, mapped = start_run(out, saved + 1, OVERRIDES, screen=screen), set()
    while second.poll() is None:
        mapped |= shared_memory(of_this_run(out))
        time.sleep(1)
    assert second.returncode == 0, screen.read_text()
    assert mapped and not any(file.exists() for file in mapped), "a clean end"
    shown = screen.read_text()
    assert f"resuming after step {saved} of {saved + 1} steps" in shown
    assert of_this_run(out) == []

    rows = read_jsonl(out / "metrics.jsonl")
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)) and steps[-1] == saved + 1
    scales = {row["step"]: row["data"]["actor/loss_scale"] for row in rows}
    # The scale doubles until it overflows after some twenty steps; how many run depends on the doctor's duration.
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

    code, refusal = finish_run(out, saved + 1, OVERRIDES)
    assert code == 1 and refusal.startswith(f"run: STEPS={saved + 1}: ") and refusal.count("\n") == 1
