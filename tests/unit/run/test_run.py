"""The command ``run``, and its use by ``make run``."""

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.report_runs import finished_run

from verl_precision.commands import run
from verl_precision.errors import Refused
from verl_precision.files import write_json
from verl_precision.run import train
from verl_precision.run.checks import check_start
from verl_precision.run.job import Job, compose, parse_job

SANITY = ["EXPERIMENT=sanity_cpu", "DEVICE=cpu", "STEPS=40"]
STRATEGY, SAVE = "actor_rollout_ref.actor.strategy", "trainer.save_freq=1"
MINI_BATCH, BETA = (f"actor_rollout_ref.actor.{key}" for key in ("ppo_mini_batch_size", "flowrl.beta"))


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["MODEL=./no/such/model"], "MODEL=./no/such/model: "),
        (["TRAIN=no-such.parquet"], "TRAIN=no-such.parquet: "),
        ([f"ARGS={SAVE} trainer.n_gpu=2"], f"ARGS={SAVE} trainer.n_gpu=2: Could not override"),
        ([f"ARGS={BETA}=0", "RECIPE=flowrl"], f"ARGS={BETA}=0: "),
        (["ARGS=trainer.n_gpus_per_node=64"], "trainer.n_gpus_per_node=64: must be at most 4: "),
        ([f"ARGS={STRATEGY}=fsdp3"], f"{STRATEGY}=fsdp3 is no strategy of verl 0.9.1; give ARGS={STRATEGY}=fsdp or"),
        (["--check", f"ARGS={STRATEGY}=fsdp3"], f"{STRATEGY}=fsdp3 is no strategy of verl 0.9.1"),
        (["--check", "SEED=2", "ARGS=trainer.n_gpu=2"], "ARGS=trainer.n_gpu=2: Could not override"),
        (
            ["--check", f"ARGS=trainer.save_freq=1 {MINI_BATCH}=64"],
            f"ARGS=trainer.save_freq=1 {MINI_BATCH}=64: train_batch_size (32)",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(words, refusal, validated_here, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "interrupt_on_signals", lambda: None)
    with pytest.raises(Refused, match=f"^{re.escape(refusal)}") as refused:
        job = run.parse(["DEVICE=cpu", f"OUT={tmp_path / 'out'}", *(word for word in words if word != "--check")])
        run.main(job, check="--check" in words)
    assert "\n" not in str(refused.value) and list(tmp_path.iterdir()) == []


def test_check_reports_which_runs_are_finished_and_writes_nothing(validated_here, tmp_path, capsys, monkeypatch):
    done, ahead = finished_run(tmp_path / "done", *SANITY, steps=40), tmp_path / "ahead"
    before = sorted(tmp_path.rglob("*"))
    sanity = dict(word.partition("=")[::2] for word in SANITY)
    wanted = [sanity | {"OUT": str(done)}, sanity | {"SEED": "2", "OUT": str(ahead)}]
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(wanted)))
    run.main(run.parse([]), check_each=True)
    shown = [(run["out"], run["steps"], run["finished"]) for run in json.loads(capsys.readouterr().out)]
    assert shown == [(str(done), 40, True), (str(ahead), 40, False)]
    assert sorted(tmp_path.rglob("*")) == before


def test_run_on_a_cluster_is_not_compared_with_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    job = parse_job(["DEVICE=cpu", f"OUT={tmp_path / 'out'}", "ARGS=trainer.n_gpus_per_node=64 trainer.nnodes=2"])
    assert check_start(job, compose(job, job.out), job.out)["steps"] == 26


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Callable[[], tuple[int, dict]]:
    """``trained()``: the exit code of a run whose training fails, and the record that this got."""
    for name in ("interrupt_on_signals", "validate"):
        monkeypatch.setattr(run, name, lambda *_: None)
    monkeypatch.setattr(Job, "generate_command", lambda _: [sys.executable, "-c", ""])
    records = []
    monkeypatch.setattr(train, "train", lambda job, config, out, record, log: records.append(record) or 75)
    return lambda: (run.run(run.parse([*SANITY, f"OUT={tmp_path / 'out'}"])), records[0])


@pytest.mark.parametrize(("checkpoint", "wall_s"), [(0, 0.0), (2, 100.0)])
def test_time_counts_from_the_attempts_that_left_a_checkpoint(checkpoint, wall_s, trained, tmp_path):
    out = finished_run(tmp_path / "out", *SANITY, steps=40)
    (out / "summary.json").unlink()
    write_json(out / "run.json", json.loads((out / "run.json").read_text()) | {"wall_s": 100.0})
    if checkpoint:
        (out / f"checkpoints/global_step_{checkpoint}").mkdir(parents=True)
        (out / "checkpoints/latest_checkpointed_iteration.txt").write_text(str(checkpoint))
    code, record = trained()
    assert code == 75 and record["wall_s"] == wall_s and not (out / "summary.json").exists()


def test_run_and_its_check_are_fitted_to_the_gpus(trained, validated_here, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "fit_to_gpus", lambda job: (replace(job, steps=7), "Tesla T4 (sm75): +device=turing"))
    run.main(run.parse([*SANITY, f"OUT={tmp_path / 'out'}"]), check=True)
    (checked,) = json.loads(capsys.readouterr().out)
    _, record = trained()
    assert checked["steps"] == record["steps"] == 7
    assert capsys.readouterr().out.startswith("Tesla T4 (sm75): +device=turing\n")
