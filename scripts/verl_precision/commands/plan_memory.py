"""Plan the GPU memory of a job.

Arithmetic over verl's composed configuration and the model's config.json: nothing is downloaded, built or run, and no
GPU is needed. With OUT it writes plan-memory.md and plan-memory.json there. Exit code 0: planned, whether the job fits
or not; 1: refused.
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from verl_precision.bench.memory_plan import GIB, MemoryPlan, check_supported, plan_job
from verl_precision.files import check_room, write_json
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
    "MEMORY": "GiB of one GPU, default 80",
    "LENGTH": "tokens of a prompt and its answer, default the experiment's maximum",
    "OUT": "a folder for the tables, also as JSON, default none",
    "ARGS": "further Hydra overrides of verl in one string, e.g. 'trainer.nnodes=4 trainer.n_gpus_per_node=4'",
}
EXPERIMENTS = ("dense_7b", "dense_32b", "moe_30b")


class PlanRequest(NamedTuple):
    """What a command line requests, and the values of its variables."""

    values: dict[str, str]
    jobs: list[Job]
    memory: int  # bytes of one GPU
    length: int | None  # tokens of a prompt and its answer
    out: Path | None


def chosen_options(values: dict[str, str], name: str, default: Sequence[str]) -> list[str]:
    """Return the words of a variable, each an option of its config group.

    Raises:
        Refused: a word is not an option.
    """
    words = shell_words(name, values.get(name, " ".join(default)))
    return [one_of({name: word}, name, options(name.lower()), "") for word in words]


def parse(words: list[str]) -> PlanRequest:
    """Return what the words request, after refusing those that are not allowed."""
    values = parse_words(words, VARIABLES)
    memory, length = whole_number(values, "MEMORY", 1, 80) * GIB, whole_number(values, "LENGTH", 1, None)
    common = {name: values[name] for name in ("ALGO", "RECIPE", "ARGS") if name in values}
    experiments = chosen_options(values, "EXPERIMENT", EXPERIMENTS)
    jobs = []
    for experiment, precision in product(experiments, chosen_options(values, "PRECISION", ["fp16"])):
        # Parsed with DEVICE=cpu, which needs no GPU on this machine; the planned job gets its device.
        choices = common | {"EXPERIMENT": experiment, "PRECISION": precision, "DEVICE": "cpu"}
        job = parse_job([f"{name}={value}" for name, value in choices.items()])
        jobs.append(replace(job, device="cuda", model=values.get("MODEL")))
    out = Path(file_path(values, "OUT")) if "OUT" in values else None
    if out:
        check_room(out)
    return PlanRequest(values, jobs, memory, length, out)


def plan_all(request: PlanRequest) -> dict[str, MemoryPlan]:
    """Return the plan of each job by its title.

    Raises:
        Refused: the configuration or the model cannot be planned.
    """
    plans = {}
    for job in request.jobs:
        config = compose(job, Path("out"))
        check_supported(config)
        # For LoRA verl looks for vLLM, which needs the platform of a separate process.
        validate(job, config, here=not config.actor_rollout_ref.model.lora_rank)
        plans[f"{job.experiment}, {job.objective}, {job.precision}"] = plan_job(config, request.memory, request.length)
    return plans


def write(plans: dict[str, MemoryPlan], values: dict[str, str], out: Path) -> None:
    """Write plan-memory.md and plan-memory.json to ``out``; ``values`` are the command's."""
    out.mkdir(parents=True, exist_ok=True)
    settings = (f"{name}={shlex.quote(value)}" for name, value in values.items() if name != "OUT")
    command = " ".join(["make plan-memory", *settings])
    parts = ["# Memory of a job on each GPU", f"`{spelled(command)}`, by arithmetic ([how](../how-to/plan-memory.md))."]
    parts += [f"## {title}\n\n```text\n{plan.table(title)}\n```" for title, plan in plans.items()]
    (out / "plan-memory.md").write_text("\n\n".join(parts) + "\n")
    content = {title: {"moments": plan.moments, "fits": plan.fits} for title, plan in plans.items()}
    write_json(out / "plan-memory.json", content)


def main(request: PlanRequest) -> int:
    plans = plan_all(request)
    print("\n\n".join(plan.table(title) for title, plan in plans.items()))
    if request.out:
        write(plans, request.values, request.out)
        print(f"\n  {request.out / 'plan-memory.md'}")
    return 0
