"""Plan what a job takes on each GPU: ``scripts/plan_memory.py [NAME=VALUE ...]``.

Arithmetic over verl's composed configuration and the numbers of the model's config.json: nothing is downloaded, built
or run, and no GPU is needed. With OUT it writes plan-memory.md, plan-memory.json and plan-memory.png there. Exit code
0: planned, whether it fits or not; 1: refused.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lib import cli
from lib.bench import memory_model as memory
from lib.bench.memory_model import BESIDE_TENSORS, GIB, Plan, peak
from lib.errors import Refused
from lib.run.checks import check_room
from lib.run.job import compose, parse_job
from lib.run.validation import validate

VARIABLES = {
    "EXPERIMENT": "one or several, default dense_7b dense_32b moe_30b: {experiment}",
    "PRECISION": "one or several, default fp16: {precision}",
    "ALGO": "default grpo; ppo has a critic: {algo}",
    "RECIPE": "another objective than ALGO's, default none: {recipe}",
    "MODEL": "a folder with a config.json, or a name whose numbers are built in, default the experiment's",
    "DEVICE": "cuda, or cpu for the whole job on one machine without a GPU; default cuda, whatever is here",
    "MEMORY": "GiB of one GPU, or of that machine, default 80",
    "LENGTH": "tokens of a prompt and its answer, default the most that the experiment allows",
    "OUT": "a folder for table and figure, default none",
    "ARGS": "further Hydra overrides of verl, e.g. ARGS='trainer.nnodes=4 trainer.n_gpus_per_node=4'",
}
EXPERIMENTS = ("dense_7b", "dense_32b", "moe_30b")
PARTS = ("weights", "Adam", "gradients", "gathered", "reduced", "activations", "logits")
PARTS += ("rollout's weights", "KV cache")


def usage() -> str:
    groups = {group: ", ".join(cli.options(group)) for group in ("experiment", "precision", "algo", "recipe")}
    return "\n".join(f"  {name:<11} {text.format(**groups)}" for name, text in VARIABLES.items())


def several(given: dict[str, str], name: str, default: Sequence[str]) -> list[str]:
    """The words of a variable, each among the options of its group.

    Raises:
        Refused: one is not.
    """
    words = cli.shell_words(name, given.get(name, " ".join(default)))
    return [cli.one_of({name: word}, name, cli.options(name.lower()), "") for word in words]


def plans(words: list[str]) -> tuple[dict[str, Plan], Path | None]:
    """The plan of each experiment and regime by its title, and OUT.

    Raises:
        Refused: a variable, the configuration or the model is not among those planned.
    """
    given = cli.parse_words(words, VARIABLES)
    memory_gib = cli.whole_number(given, "MEMORY", 1, 80)
    length = cli.whole_number(given, "LENGTH", 1, None)
    out = Path(cli.file_path(given, "OUT")) if "OUT" in given else None
    device = cli.one_of(given, "DEVICE", ["cuda", "cpu"], "cuda")
    passed = {name: given[name] for name in ("ALGO", "RECIPE", "ARGS") if name in given}
    found = {}
    for experiment in several(given, "EXPERIMENT", EXPERIMENTS):
        for precision in several(given, "PRECISION", ["fp16"]):
            # DEVICE=cpu asks for no GPU on this machine; what is planned has them.
            choices = passed | {"EXPERIMENT": experiment, "PRECISION": precision, "DEVICE": "cpu"}
            job = parse_job([f"{name}={value}" for name, value in choices.items()])
            job = replace(job, device=device, model=given.get("MODEL"))
            config = compose(job, Path("out"))
            memory.check(config)
            validate(job, config, here=True)
            title = f"{experiment}, {job.objective}, {precision}"
            found[title] = memory.of_job(config, memory_gib * GIB, length)
    return found, out


def table(title: str, plan: Plan, mark: str = "") -> str:
    """One line a moment: its parts and their sum, in GiB; the largest is marked. ``mark`` is ``|`` for Markdown."""
    shown = [part for part in PARTS if any(parts.get(part) for parts in plan.moments.values())]
    most, size = peak(plan.moments)
    kind = f", {plan.shape.experts} experts, {plan.shape.active} of them active" if plan.shape.experts else ""
    head = [
        f"{title}: {plan.model}, {plan.shape.total / 1e9:.2f} G parameters{kind}",
        f"{plan.nodes} nodes of {plan.gpus} GPUs of {plan.memory / GIB:.0f} GiB"
        if plan.device != "cpu"
        else f"a machine of {plan.memory / GIB:.0f} GiB",
    ]
    head[1] += f", micro-batches of {plan.tokens:,} tokens a worker"
    rows = [["GiB of each worker", *shown, "sum"]]
    for name, parts in plan.moments.items():
        total = sum(parts.values())
        cells = [f"{parts.get(part, 0) / GIB:.1f}" if parts.get(part) else "" for part in shown]
        rows.append([name, *cells, f"{total / GIB:.1f}{' *' if name == most else ''}"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"{mark} ".lstrip()
        + f" {mark} ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + f" {mark}".rstrip()
        for row in rows
    ]
    if mark:
        lines.insert(1, "| --- " + "| ---: " * (len(widths) - 1) + "|")
    fit = f"{'fits' if plan.fits else 'DOES NOT FIT'} into {plan.memory / GIB:.0f}"
    if plan.device == "cpu":
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.machine.items())
        whole = sum(plan.machine.values()) / GIB
        return "\n".join([*head, "", *lines, "", f"the job: {whole:.1f} GiB ({parts}): {fit}"])
    verdict = f"{size / GIB:.1f} GiB of tensors at most ({most}) and {BESIDE_TENSORS / GIB:.0f} beside them: {fit}"
    cache = plan.rollout.cache // plan.rollout.token
    kept = f"KV cache: {cache:,} tokens a rollout server at most, {plan.rollout.token / 1024:.0f} KiB each on a GPU"
    return "\n".join([*head, "", *lines, "", verdict, kept])


def figure(found: dict[str, Plan], file: Path) -> None:
    """Each plan's moments as stacked bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (11, 0.6 + sum(0.6 + 0.24 * len(plan.moments) for plan in found.values()))
    figure, axes = plt.subplots(
        len(found),
        figsize=size,
        layout="constrained",
        squeeze=False,
        sharex=True,
        gridspec_kw={"height_ratios": [2 + len(plan.moments) for plan in found.values()]},
    )
    for axis, (title, plan) in zip(axes[:, 0], found.items(), strict=True):
        names, left = list(plan.moments), [0.0] * len(plan.moments)
        for colour, part in enumerate(PARTS):
            sizes = [plan.moments[name].get(part, 0) / GIB for name in names]
            if any(sizes):
                axis.barh(names, sizes, left=left, color=f"C{colour}", label=part, height=0.8)
            left = [start + more for start, more in zip(left, sizes, strict=True)]
        axis.barh(names, BESIDE_TENSORS / GIB, left=left, color="lightgrey", label="beside tensors", height=0.8)
        axis.axvline(plan.memory / GIB, color="black", linewidth=1)
        axis.invert_yaxis()
        axis.set_title(f"{title}: {plan.model}, {plan.nodes} × {plan.gpus} GPUs", fontsize=10, loc="left")
        axis.tick_params(labelsize=8)
    axes[-1, 0].set_xlabel("GiB on each GPU")
    legends = [axis.get_legend_handles_labels() for axis in axes[:, 0]]
    handles = {label: handle for legend in legends for handle, label in zip(*legend, strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main(words: list[str]) -> int:
    if words in (["--help"], ["-h"]):
        print(f"{__doc__}\n{usage()}")
        return 0
    found, out = plans(words)
    print("\n\n".join(table(title, plan) for title, plan in found.items()))
    if out:
        check_room(out)
        out.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["make", "plan-memory", *(word for word in words if not word.startswith("OUT="))])
        tables = [table(title, plan, "|").removeprefix(f"{title}: ") for title, plan in found.items()]
        sections = [f"## {title}\n\n{text}" for title, text in zip(found, tables, strict=True)]
        (out / "plan-memory.md").write_text(
            f"# What a job takes on each GPU\n\n`{command}`, by arithmetic ([docs/scale.md](../scale.md)).\n\n"
            "![Stacked bars of each moment of a step](plan-memory.png)\n\n" + "\n\n".join(sections) + "\n"
        )
        told = {title: {"moments": plan.moments, "fits": plan.fits} for title, plan in found.items()}
        (out / "plan-memory.json").write_text(json.dumps(told, indent=1) + "\n")
        figure(found, out / "plan-memory.png")
        print(f"\n  {out / 'plan-memory.md'}\n  {out / 'plan-memory.png'}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as refusal:
        sys.exit(f"plan-memory: {refusal}")
