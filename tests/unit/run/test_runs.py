"""A run's folder: metrics across interruptions, resumption, the summary and the progress line."""

import json
import shutil
from pathlib import Path

import pytest

from verl.utils.tracking import FileLogger
from verl_precision.errors import Refused
from verl_precision.facts.metrics import (
    K3_KL,
    LOSS_SCALE,
    PROBS_DIFF,
    REWARD,
    SECONDS,
    SKIPPED,
    merge_metrics,
    metric_mean,
)
from verl_precision.files import read_jsonl, write, write_json
from verl_precision.run.folder import checkpoint_step, choose_folder, finished_as, lock, start_record
from verl_precision.run.job import Job, parse_job
from verl_precision.run.progress import progress_line
from verl_precision.run.summary import summarize, summary_table

STAMP = {"release": "0.9.1", "stack": "0123456789ab", "tree": "f" * 40}
ACTOR = {"role": "actor", "rank": 0, "compute": "float16", "loss_scaling": True, "stamp": STAMP}
ROLLOUT = {"role": "rollout", "rank": 0, "rollout": "float16", "stamp": STAMP}
FLOWRL = {"actor/flowrl/log_z": -0.5, "actor/flowrl/delta_std": 13.81, "flowrl/distinct_right_answers": 1.25}


def metrics(step: int, **more: float) -> dict:
    data = {REWARD: step / 10, PROBS_DIFF: 1e-5 * step, K3_KL: 1e-7 * step, SECONDS: 2.0}
    return data | {LOSS_SCALE: 65536.0 / step, SKIPPED: 1.0 if step == 2 else 0.0} | more


def rows(last: int, **more: float) -> list[dict]:
    return [{"step": step, "data": metrics(step, **more)} for step in range(1, last + 1)]


def steps_of(rows: list[dict]) -> list[int]:
    return [row["step"] for row in rows]


def verl_logs(out: Path, steps: range, monkeypatch) -> None:
    """Write the file of one attempt of verl, whose logger truncates it first."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(out / "verl.jsonl"))
    logger = FileLogger("project", "experiment")
    for step in steps:
        logger.log(metrics(step), step)
    logger.finish()


def job(*words: str) -> Job:
    return parse_job(["DEVICE=cpu", *words])


def started(out: Path, *words: str, checkpoint: int = 0, finished: bool = False) -> Path:
    """Create the folder of a run of 10 steps as the command ``run`` leaves it."""
    record = start_record(job(*words), out, 10)
    write(out / "metrics.jsonl", b'{"step": 1, "data": {}}\n')
    write_json(out / "run.json", record)
    if checkpoint:
        (out / f"checkpoints/global_step_{checkpoint}").mkdir(parents=True)
        write(out / "checkpoints/latest_checkpointed_iteration.txt", str(checkpoint).encode())
    if finished:
        write_json(out / "summary.json", {})
    return out


def test_resumed_run_has_every_step_once(tmp_path, monkeypatch):
    verl_logs(tmp_path, range(1, 6), monkeypatch)
    assert steps_of(merge_metrics(tmp_path)) == [1, 2, 3, 4, 5]
    assert steps_of(merge_metrics(tmp_path, upto=3)) == [1, 2, 3], "resumed from the checkpoint of step 3"
    verl_logs(tmp_path, range(4, 8), monkeypatch)
    merge_metrics(tmp_path)
    assert steps_of(read_jsonl(tmp_path / "metrics.jsonl")) == [1, 2, 3, 4, 5, 6, 7]


def test_run_without_a_checkpoint_starts_over_without_its_lost_steps(tmp_path, monkeypatch):
    verl_logs(tmp_path, range(1, 3), monkeypatch)
    assert merge_metrics(tmp_path, upto=0) == []


def test_validation_before_a_resumed_run_does_not_replace_the_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, "data": metrics(3)}) + "\n")
    (tmp_path / "verl.jsonl").write_text(json.dumps({"step": 3, "data": {"val-core/acc": 0.5}}) + '\n{"step": 4, "da')
    (row,) = merge_metrics(tmp_path)
    assert row == {"step": 3, "data": metrics(3) | {"val-core/acc": 0.5}}, "an incomplete line is left out"


def test_repeated_command_resumes_an_unfinished_run_and_leaves_a_finished_one_alone(tmp_path):
    first = choose_folder(job(), tmp_path)
    assert first == tmp_path / "arithmetic" / "grpo-fp16-seed1"
    started(first, checkpoint=4)
    assert choose_folder(job(), tmp_path) == first
    write_json(first / "summary.json", {})
    assert choose_folder(job(), tmp_path) == first.with_name("grpo-fp16-seed1-2")
    assert choose_folder(job("RECIPE=flowrl", "SEED=2"), tmp_path) == first.with_name("flowrl-fp16-seed2")
    assert choose_folder(job(f"OUT={first}"), tmp_path) == first


@pytest.mark.parametrize(
    "other",
    ["EXPERIMENT=terms", "PRECISION=bf16", "ALGO=ppo", "SEED=2", "MODEL=Qwen/Qwen3-0.6B", "VAL={}/data.parquet"],
)
def test_folder_with_other_settings_is_refused_by_name(other, tmp_path):
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    out = started(tmp_path / "out", "ARGS=trainer.save_freq=1 trainer.nnodes=1")
    name = other.partition("=")[0]
    with pytest.raises(Refused, match=f"^{name}=.* contains a run with {name}="):
        start_record(job(other.format(tmp_path)), out, 10)
    with pytest.raises(
        Refused, match=f"^ARGS=.* trainer.nnodes=2: {out} contains a run with ARGS=.* trainer.nnodes=1; "
    ):
        start_record(job("ARGS=trainer.save_freq=1 trainer.nnodes=2"), out, 10)
    (out / "metrics.jsonl").write_text("")  # a run that failed before its first step is replaced
    assert start_record(job(), out, 10)["settings"]["ARGS"] == ""


def test_run_resumes_only_to_more_steps(tmp_path):
    finished = started(tmp_path / "finished", checkpoint=10, finished=True)
    assert start_record(job(), finished, 11)["steps"] == 11
    with pytest.raises(Refused, match="^STEPS=10: .* finished run of 10"):
        start_record(job(), finished, 10)
    unfinished = started(tmp_path / "unfinished", checkpoint=6)
    record = json.loads((unfinished / "run.json").read_text())
    del record["settings"]["RECIPE"]  # a variable that an older run predates counts as unset
    write_json(unfinished / "run.json", record)
    assert start_record(job(), unfinished, 6)["steps"] == 6
    with pytest.raises(Refused, match="^STEPS=5: .* already at step 6"):
        start_record(job(), unfinished, 5)


def test_run_whose_checkpoints_are_all_torn_is_refused(tmp_path):
    out = started(tmp_path / "out", checkpoint=2)
    write_json(out / "checkpoints/global_step_2/manifest.json", {"files": None})  # its save was not finished
    with pytest.raises(Refused, match=f"^OUT={out}: no whole checkpoint in {out}/checkpoints: "):
        checkpoint_step(out)


def test_without_the_series_fixes_verls_tracker_names_the_checkpoint(imported, tmp_path):
    (tmp_path / "tree/verl").mkdir(parents=True)
    (tmp_path / "tree/verl/__init__.py").touch()
    imported(tmp_path / "tree")
    out = started(tmp_path / "out", checkpoint=2)
    (out / "checkpoints/global_step_2/manifest.json").unlink(missing_ok=True)
    assert checkpoint_step(out) == 2
    tracker = out / "checkpoints/latest_checkpointed_iteration.txt"
    for text in ("4", "", "none"):
        tracker.write_text(text)
        with pytest.raises(Refused, match=f"^OUT={out}: {tracker} names no checkpoint of global_step_2; let it name"):
            checkpoint_step(out)
    shutil.rmtree(out / "checkpoints/global_step_2")
    assert checkpoint_step(out) == 0


def test_finished_run_is_recognised_by_steps_and_settings(tmp_path):
    out = started(tmp_path / "finished", finished=True)
    assert [finished_as(job(), out, steps) for steps in (9, 10, 11)] == [False, True, False]
    assert not finished_as(job("SEED=2"), out, 10)
    assert not finished_as(job(), started(tmp_path / "unfinished"), 10)


def test_folder_is_locked_by_its_run(tmp_path):
    (tmp_path / "train.log").write_text("earlier\n")
    with lock(tmp_path), pytest.raises(Refused, match=f"^OUT={tmp_path}: another run is writing there"):
        lock(tmp_path)
    lock(tmp_path).close()
    assert (tmp_path / "train.log").read_text() == "earlier\n"


def summary_of(data: list[dict], reports: list[dict], *words: str, **record: float | None) -> dict:
    begun = start_record(job(*words), Path("/no/such/run"), len(data))
    return summarize(job(*words), begun | record, data, reports)


def test_summary_reports_the_measurements():
    reports = [ACTOR, ROLLOUT, ACTOR | {"rank": 1}]
    summary = summary_of(rows(8), reports, wall_s=83.25, peak_memory_gib=6.5)
    assert summary["release"] == summary["versions"]["verl"] == "0.9.1"
    assert set(summary["versions"]) == {"python", "torch", "vllm", "verl", "ray", "transformers"}
    assert (summary["precision"], summary["algo"], summary["device"], summary["steps"]) == ("fp16", "grpo", "cpu", 8)
    assert (summary["reward_first"], summary["reward_last"]) == (0.1, pytest.approx(0.6))
    assert summary["rollout_probs_diff_mean"] == pytest.approx(4.5e-5)
    assert summary["k3_kl"] == summary["k3_kl_median"] == pytest.approx(4.5e-7)
    assert (summary["loss_scale"], summary["skipped_steps"]) == (65536 / 8, 1)
    assert (summary["wall_s"], summary["peak_memory_gib"], summary["patch_stamp"]) == (83.2, 6.5, STAMP)
    actor = {"compute": "float16", "loss_scaling": True}
    assert summary["effective_dtypes"] == {"actor": actor, "rollout": {"rollout": "float16"}}
    table = summary_table(summary)
    assert "0.100 at the first step, 0.600 mean of the last 5" in table
    assert "rollout_probs_diff_mean 4.50e-05, k3_kl 4.50e-07 (run means)" in table
    summary = summary_of(rows(2), [ACTOR, ACTOR | {"rank": 1, "compute": "bfloat16", "stamp": None}])
    assert summary["patch_stamp"] == [STAMP, None] and "workers differ" in summary_table(summary)
    assert [report["compute"] for report in summary["effective_dtypes"]["actor"]] == ["float16", "bfloat16"]


@pytest.mark.parametrize(
    ("compute", "rollout", "named"),
    [
        ("float16", "float16", "fp16"),
        ("bfloat16", "float16", "bf16_train_fp16_infer"),
        ("bfloat16", "bfloat16", "bf16"),
        ("bfloat16", "float32", "actor bfloat16, rollout float32"),
    ],
)
def test_summary_names_the_regime_that_was_effective(compute, rollout, named):
    """ARGS may set a role's dtype beside PRECISION."""
    assert summary_of(rows(2), [ACTOR | {"compute": compute}, ROLLOUT | {"rollout": rollout}])["precision"] == named
    assert summary_of(rows(2), [])["precision"] == "fp16", "nothing else is known"


def test_summary_names_every_dtype_of_a_role_whose_workers_differ():
    differ = [ACTOR | {"compute": compute} for compute in ("float16", "bfloat16", "float16")]
    assert summary_of(rows(2), [*differ, ROLLOUT])["precision"] == "actor float16/bfloat16, rollout float16"


def test_summary_of_a_cluster_run_has_no_memory_and_a_median_apart_from_the_mean():
    data = [{"step": step, "data": metrics(step) | {K3_KL: k3}} for step, k3 in enumerate((1e-7, 2e-7, 9e-6), 1)]
    summary = summary_of(data, [ACTOR], peak_memory_gib=None)
    assert summary["k3_kl"] == pytest.approx(3.1e-6) and summary["k3_kl_median"] == 2e-7
    assert summary["peak_memory_gib"] is None and "- GiB at the peak" in summary_table(summary)


def test_value_of_0_counts_and_null_does_not():
    data = [{"step": step, "data": {REWARD: value}} for step, value in enumerate((0.0, None, 1.0), 1)]
    assert metric_mean(data, REWARD) == 0.5


def test_progress_is_one_line_with_flowrls_metrics():
    assert progress_line(rows(3), 40) == (
        "step  3/40  reward 0.300  mismatch: probs 3.0e-05 k3 3.0e-07  loss scale 21845.3  skipped 1"
        "  2.0 s/step  left 1:14"
    )
    untimed = [{"step": 1, "data": {REWARD: 0.1}}]
    assert progress_line(untimed, 40).endswith("  skipped -  - s/step  left -")
    flowrl = "k3 2.0e-07  log_z -0.5  delta_std 13.8  distinct_right_answers 1.25  loss scale 32768"
    assert flowrl in progress_line(rows(2, **FLOWRL), 2)
