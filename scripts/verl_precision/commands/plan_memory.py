"""Plan the GPU memory of a job.

Arithmetic over verl's composed configuration and the model's config.json: nothing is downloaded, built or run, and no
GPU is needed. With OUT it writes plan-memory.md, plan-memory.json and plan-memory.png there. Exit code 0: planned,
whether the job fits or not; 1: refused.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from verl_precision.bench.memory_plan import GIB, MemoryPlan, check_supported, plan_job
from verl_precision.bench.memory_report import plot, table
from verl_precision.facts.packages import check_packages
from verl_precision.files import check_room
from verl_precision.run.job import Job, compose, parse_job
from verl_precision.run.validation import validate
from verl_precision.spelling import spelled
from verl_precision.words import file_path, one_of, options, parse_words, shell_words, whole_number

VARIABLES = {
    "EXPERIMENT": "one or several, default dense_7b dense_32b moe_30b: {experiment}",
    "PRECISION": "one or several, default fp16: {precision}",
    "ALGO": "default grpo; ppo has a critic: {algo}",
    "RECIPE": "another objective than ALGO's, default none: {recipe}",
    "MODEL": "a folder with a config.json, or a model whose dimensions are built in, default the experiment's",
    "DEVICE": "cuda, or cpu for the whole job on one machine without a GPU; default cuda, on any machine",
    "MEMORY": "GiB of one GPU, or of that machine, default 80",
    "LENGTH": "tokens of a prompt and its answer, default the experiment's maximum",
    "OUT": "a folder for table and figure, default none",
    "ARGS": "further Hydra overrides of verl in one string, e.g. 'trainer.nnodes=4 trainer.n_gpus_per_node=4'",
}
EXPERIMENTS = ("dense_7b", "dense_32b", "moe_30b")


def several(values: dict[str, str], name: str, default: Sequence[str]) -> list[str]:
    """Return the words of a variable, each an option of its config group.

    Raises:
        Refused: a word is not an option.
    """
    words = shell_words(name, values.get(name, " ".join(default)))
    return [one_of({name: word}, name, options(name.lower()), "") for word in words]


@dataclass(frozen=True)
class MemoryPlanOptions:
    """The jobs to plan, and for which GPU: its memory in GiB, and tokens of a prompt and its answer."""

    jobs: tuple[Job, ...]
    memory_gib: int
    length: int | None
    out: Path | None


def parse(words: list[str]) -> MemoryPlanOptions:
    """Parse ``NAME=VALUE`` words.

    Raises:
        Refused: a name or a value is not allowed.
    """
    values = parse_words(words, VARIABLES)
    memory_gib = whole_number(values, "MEMORY", 1, 80)
    length = whole_number(values, "LENGTH", 1, None)
    out = Path(file_path(values, "OUT")) if "OUT" in values else None
    device = one_of(values, "DEVICE", ["cuda", "cpu"], "cuda")
    common = {name: values[name] for name in ("ALGO", "RECIPE", "ARGS") if name in values}
    jobs = []
    for experiment in several(values, "EXPERIMENT", EXPERIMENTS):
        for precision in several(values, "PRECISION", ["fp16"]):
            # Parsed with DEVICE=cpu, which needs no GPU on this machine; the planned job gets its own device.
            choices = common | {"EXPERIMENT": experiment, "PRECISION": precision, "DEVICE": "cpu"}
            job = parse_job([f"{name}={value}" for name, value in choices.items()])
            jobs.append(replace(job, device=device, model=values.get("MODEL")))
    return MemoryPlanOptions(tuple(jobs), memory_gib, length, out)


def plan_all(options: MemoryPlanOptions) -> dict[str, MemoryPlan]:
    """Return the plan of each job by its title.

    Raises:
        Refused: the configuration or the model cannot be planned.
    """
    plans = {}
    for job in options.jobs:
        config = compose(job, Path("out"))
        check_supported(config)
        # For LoRA verl looks for vLLM, which needs the platform of a process of its own.
        validate(job, config, here=not config.actor_rollout_ref.model.lora_rank)
        title = f"{job.experiment}, {job.objective}, {job.precision}"
        plans[title] = plan_job(config, options.memory_gib * GIB, options.length)
    return plans


def write(plans: dict[str, MemoryPlan], words: list[str], out: Path) -> None:
    """Write plan-memory.md, plan-memory.json and plan-memory.png to ``out``; ``words`` are the command's."""
    check_room(out)
    out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["make", "plan-memory", *(word for word in words if not word.startswith("OUT="))])
    tables = [table(title, plan, markdown=True).removeprefix(f"{title}: ") for title, plan in plans.items()]
    sections = [f"## {title}\n\n{text}" for title, text in zip(plans, tables, strict=True)]
    (out / "plan-memory.md").write_text(
        f"# What a job takes on each GPU\n\n`{spelled(command)}`, by arithmetic ([how](../how-to/plan-memory.md)).\n\n"
        "![Stacked bars of each moment of a step](plan-memory.png)\n\n" + "\n\n".join(sections) + "\n"
    )
    content = {title: {"moments": plan.moments, "fits": plan.fits} for title, plan in plans.items()}
    (out / "plan-memory.json").write_text(json.dumps(content, indent=1) + "\n")
    plot(plans, out / "plan-memory.png")


def main(words: list[str]) -> int:
    parsed = parse(words)
    if parsed.out:
        check_packages(("matplotlib",))
    plans, out = plan_all(parsed), parsed.out
    print("\n\n".join(table(title, plan) for title, plan in plans.items()))
    if out:
        write(plans, words, out)
        print(f"\n  {out / 'plan-memory.md'}\n  {out / 'plan-memory.png'}")
    return 0
