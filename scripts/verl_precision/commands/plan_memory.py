"""Plan the GPU memory of a job.

Arithmetic over verl's composed configuration and the model's config.json: nothing is downloaded, built or run, and no
GPU is needed. With OUT it writes plan-memory.md there. Exit code 0: planned, whether the job fits
or not; 1: refused.
"""

import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path

from verl_precision.bench.memory_plan import GIB, MemoryPlan, check_supported, plan_job
from verl_precision.files import check_room
from verl_precision.run.job import Job, compose, parse_job
from verl_precision.run.validation import validate
from verl_precision.spelling import spelled
from verl_precision.words import file_path, parse_words, whole_number

VARIABLES = {
    "EXPERIMENT": "one or several, default dense_7b dense_32b moe_30b: {experiment}",
    "PRECISION": "one or several, default fp16: {precision}",
    "ALGO": "default grpo; ppo has a critic: {algo}",
    "RECIPE": "another objective than ALGO's, default none: {recipe}",
    "MODEL": "a folder with a config.json, or a model whose dimensions are built in, default the experiment's",
    "MEMORY": "GiB of one GPU, default 80",
    "LENGTH": "tokens of a prompt and its answer, default the experiment's maximum",
    "OUT": "a folder for plan-memory.md, the tables, default none",
    "ARGS": "further Hydra overrides of verl in one string, e.g. 'trainer.nnodes=4 trainer.n_gpus_per_node=4'",
}
EXPERIMENTS = "dense_7b dense_32b moe_30b"


Request = tuple[dict[str, str], list[Job], int, int | None, Path | None]


def parse(words: list[str]) -> Request:
    """Return the values of the variables, the jobs to plan, MEMORY in bytes, LENGTH and OUT."""
    values = parse_words(words, VARIABLES)
    memory, length = whole_number(values, "MEMORY", 1, 80) * GIB, whole_number(values, "LENGTH", 1, None)
    common = {name: values[name] for name in ("ALGO", "RECIPE", "ARGS") if name in values}
    experiments, precisions = values.get("EXPERIMENT", EXPERIMENTS).split(), values.get("PRECISION", "fp16").split()
    jobs = []
    for experiment, precision in product(experiments, precisions):
        # Parsed with DEVICE=cpu, which needs no GPU on this machine; the planned job gets its device.
        choices = common | {"EXPERIMENT": experiment, "PRECISION": precision, "DEVICE": "cpu"}
        job = parse_job([f"{name}={value}" for name, value in choices.items()])
        jobs.append(replace(job, device="cuda", model=values.get("MODEL")))
    out = Path(file_path(values, "OUT")) if "OUT" in values else None
    if out:
        check_room(out)
    return values, jobs, memory, length, out


def plan_all(jobs: list[Job], memory: int, length: int | None) -> dict[str, MemoryPlan]:
    """Return the plan of each job by its title, or refuse what cannot be planned."""
    plans = {}
    for job in jobs:
        config = compose(job, Path("out"))
        check_supported(config)
        # For LoRA verl looks for vLLM, which needs the platform of a separate process.
        validate(job, config, here=not config.actor_rollout_ref.model.lora_rank)
        plans[f"{job.experiment}, {job.objective}, {job.precision}"] = plan_job(config, memory, length)
    return plans


def write(plans: dict[str, MemoryPlan], values: dict[str, str], out: Path) -> None:
    """Write plan-memory.md to ``out``; ``values`` are the command's."""
    out.mkdir(parents=True, exist_ok=True)
    settings = (f"{name}={shlex.quote(value)}" for name, value in values.items() if name != "OUT")
    command = " ".join(["make plan-memory", *settings])
    parts = ["# Memory of a job on each GPU", f"`{spelled(command)}`, by arithmetic: docs/how-to/gpus.md."]
    parts += [f"## {title}\n\n```text\n{plan.table(title)}\n```" for title, plan in plans.items()]
    (out / "plan-memory.md").write_text("\n\n".join(parts) + "\n")


def main(request: Request) -> int:
    values, jobs, memory, length, out = request
    plans = plan_all(jobs, memory, length)
    print("\n\n".join(plan.table(title) for title, plan in plans.items()))
    if out:
        write(plans, values, out)
        print(f"\n  {out / 'plan-memory.md'}")
    return 0
