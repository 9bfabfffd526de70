"""Read verl's metrics of one run: their names, the rows of ``metrics.jsonl``, and sums over the steps."""

import json
from pathlib import Path
from statistics import fmean

from verl_precision.files import read_jsonl

REWARD = "critic/score/mean"
PROBS_DIFF = "training/rollout_probs_diff_mean"
K3_KL = "rollout_corr/k3_kl"
EQUAL_SHARE = "training/rollout_logprobs_equal_share"
LOSS_SCALE = "actor/loss_scale"
SKIPPED = "actor/skipped_steps"
CRITIC_LOSS_SCALE = "critic/loss_scale"
CRITIC_SKIPPED = "critic/skipped_steps"
SECONDS = "timing_s/step"
FLOWRL = {  # of RECIPE=flowrl, by the name under which they are shown
    "log_z": "actor/flowrl/log_z",
    "delta_std": "actor/flowrl/delta_std",
    "distinct_right_answers": "flowrl/distinct_right_answers",
    "effective_samples": "actor/flowrl/effective_samples",
}
LAST = 5  # steps whose mean is the last reward


def merge_metrics(out: Path, upto: int | None = None) -> list[dict]:
    """Merge ``verl.jsonl`` into ``metrics.jsonl``, one line a step, and drop the steps after ``upto``. Return all.

    verl's file logger overwrites its file, ``verl.jsonl``, when a run resumes.
    """
    merged: dict[int, dict] = {}
    for row in read_jsonl(out / "metrics.jsonl") + read_jsonl(out / "verl.jsonl"):
        merged.setdefault(row["step"], {}).update(row["data"])
    kept = [{"step": step, "data": merged[step]} for step in sorted(merged) if upto is None or step <= upto]
    temporary = out / "metrics.tmp"
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
    temporary.replace(out / "metrics.jsonl")
    return kept


def training_rows(all_rows: list[dict]) -> list[dict]:
    """Return the rows of training steps: a row of only a validation has no reward of the training batch."""
    return [row for row in all_rows if REWARD in row["data"]]


def metric_values(data: list[dict], name: str) -> list[float]:
    """Return a metric's values, without the steps that lack it; verl's logger writes NaN as null."""
    return [row["data"][name] for row in data if row["data"].get(name) is not None]


def metric_mean(data: list[dict], name: str) -> float | None:
    return fmean(metric_values(data, name)) if metric_values(data, name) else None


def metric_total(data: list[dict], name: str) -> int | None:
    """Return a metric's sum over the steps; None where no step has it, as without loss scaling."""
    return int(sum(metric_values(data, name))) if metric_values(data, name) else None
