"""Plan the GPU memory of a job.

Arithmetic over verl's composed configuration and the model's config.json: nothing is downloaded, built or run, and no
GPU is needed. TRACE=yes also runs an update of the actor by verl's patched engine, as one of the job's ranks, on
tensors that have shapes and no data, and adds what the ranks send each other and the peak. With OUT it writes
plan-memory.md there. Exit code 0: planned, whether the job fits or not; 1: refused or failed.
"""

import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from verl_precision.bench.memory_plan import GIB, check_supported, plan_job
from verl_precision.bench.trace import check_traceable, trace_job
from verl_precision.files import check_room
from verl_precision.run.job import Job, compose, parse_job
from verl_precision.run.validation import validate
from verl_precision.spelling import spelled
from verl_precision.words import file_path, one_of, parse_words, whole_number

if TYPE_CHECKING:
    from omegaconf import DictConfig

VARIABLES = {
    "EXPERIMENT": "one or several, default dense_7b dense_32b moe_30b: {experiment}",
    "PRECISION": "one or several, default fp16: {precision}",
    "ALGO": "default grpo; ppo has a critic: {algo}",
    "RECIPE": "another objective than ALGO's, default none: {recipe}",
    "MODEL": "a folder with a config.json, or a model whose dimensions are built in, default the experiment's",
    "MEMORY": "GiB of one GPU, default 80",
    "LENGTH": "tokens of a prompt and its answer, default the experiment's maximum",
    "TRACE": "yes also runs an update of the patched engine on tensors without data, for minutes; default no",
    "OUT": "a folder for plan-memory.md, the tables, default none",
    "ARGS": "further Hydra overrides of verl in one string, e.g. 'trainer.nnodes=4 trainer.n_gpus_per_node=4'",
}
EXPERIMENTS = "dense_7b dense_32b moe_30b"


class Request(NamedTuple):
    """What is planned."""

    values: dict[str, str]  # of the variables
    jobs: list[Job]
    memory: int  # bytes of one GPU
    length: int | None  # tokens
    trace: bool
    out: Path | None


def parse(words: list[str]) -> Request:
    """Return what the variables request."""
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
    trace = one_of(values, "TRACE", ["yes", "no"], "no") == "yes"
    out = Path(file_path(values, "OUT")) if "OUT" in values else None
    if out:
        check_room(out)
    return Request(values, jobs, memory, length, trace, out)


def compose_all(request: Request) -> dict[str, "DictConfig"]:
    """Return the configuration of each job by the job's title, or refuse what cannot be planned."""
    configs = {}
    for job in request.jobs:
        config = compose(job, Path("out"))
        check_supported(config)
        if request.trace:
            check_traceable(config)
        # For LoRA verl looks for vLLM, which needs the platform of a separate process.
        validate(job, config, here=not config.actor_rollout_ref.model.lora_rank)
        configs[f"{job.experiment}, {job.objective}, {job.precision}"] = config
    return configs


def write(tables: dict[str, str], values: dict[str, str], out: Path) -> None:
    """Write plan-memory.md to ``out``; ``values`` are the command's."""
    out.mkdir(parents=True, exist_ok=True)
    settings = (f"{name}={shlex.quote(value)}" for name, value in values.items() if name != "OUT")
    command = " ".join(["make plan-memory", *settings])
    parts = ["# Memory of a job on each GPU", f"`{spelled(command)}`, by arithmetic ([how](../how-to/plan-memory.md))."]
    parts += [f"## {title}\n\n```text\n{table}\n```" for title, table in tables.items()]
    (out / "plan-memory.md").write_text("\n\n".join(parts) + "\n")


def main(request: Request) -> int:
    configs = compose_all(request)
    tables = {title: plan_job(each, request.memory, request.length).table(title) for title, each in configs.items()}
    print("\n\n".join(tables.values()))
    if request.trace:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            traces = pool.map(lambda config: trace_job(config, request.length).table(), configs.values())
            for title, trace in zip(tables, traces, strict=True):
                print(f"\n{title}: {trace}", flush=True)
                tables[title] += f"\n\n{trace}"
    if request.out:
        write(tables, request.values, request.out)
        print(f"\n  {request.out / 'plan-memory.md'}")
    return 0
