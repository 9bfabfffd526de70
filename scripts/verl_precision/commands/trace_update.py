"""Trace an update of a job's actor without GPUs: what its ranks send each other, and the peak of memory.

A process runs verl's patched engine as one of the job's ranks, on tensors that have shapes and dtypes but no data, and
torch's fake process group answers for the other ranks. Compares the memory with that of plan-memory's arithmetic. Takes
one to four minutes for each regime. Writes trace-update.md to OUT. Exit code 0: traced; 1: refused or failed.
"""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from verl_precision.bench.memory_plan import GIB, check_supported
from verl_precision.bench.trace import Collective, Trace, check_traceable, trace_job
from verl_precision.errors import Refused
from verl_precision.facts.packages import version
from verl_precision.files import check_room
from verl_precision.format import markdown_table
from verl_precision.paths import OUTPUTS
from verl_precision.process import several_at_once
from verl_precision.run.job import CPU_PLATFORM, Job, compose, parse_job
from verl_precision.run.validation import validate
from verl_precision.spelling import spelled
from verl_precision.words import file_path, options, parse_words, some_of, whole_number

if TYPE_CHECKING:
    from omegaconf import DictConfig

VARIABLES = {
    "EXPERIMENT": "one of: {experiment}; default three jobs of 8, 64 and 256 GPUs",
    "MODEL": "a folder with a config.json, or a model whose dimensions are built in, default the experiment's",
    "PRECISION": "the regimes, default all: {precision}",
    "LENGTH": "tokens of a prompt and its answer, default the experiment's maximum",
    "ARGS": "further Hydra overrides of verl in one string, e.g. 'trainer.nnodes=4'",
    "OUT": "the folder for trace-update.md, default outputs/trace-update",
}
DEFAULT = (  # experiment, model, nodes of 8 GPUs
    ("dense_7b", "Qwen/Qwen2.5-7B", 1),
    ("dense_32b", "Qwen/Qwen2.5-32B", 8),
    ("moe_30b", "Qwen/Qwen3-235B-A22B", 32),
)
PACKAGES = ("verl", "torch", "transformers")  # whose versions the page names


class TraceRequest(NamedTuple):
    """What is traced."""

    jobs: list[Job]
    length: int | None  # tokens
    values: dict[str, str]  # of the variables
    out: Path


def parse(words: list[str]) -> TraceRequest:
    """Return what the variables request."""
    values = parse_words(words, VARIABLES)
    length = whole_number(values, "LENGTH", 1, None)
    regimes = some_of(values, "PRECISION", options("precision"), "fp16 bf16 bf16_train_fp16_infer fp32")
    jobs = []
    for experiment, model, nodes in [(values["EXPERIMENT"], None, None)] if "EXPERIMENT" in values else DEFAULT:
        args = " ".join(filter(None, [nodes and f"trainer.nnodes={nodes}", values.get("ARGS")]))
        for precision in regimes:
            # Parsed with DEVICE=cpu, which needs no GPU on this machine; the traced job gets its device.
            choices = {"EXPERIMENT": experiment, "PRECISION": precision, "DEVICE": "cpu", "ARGS": args}
            job = parse_job([f"{name}={value}" for name, value in choices.items() if value])
            jobs.append(replace(job, device="cuda", model=values.get("MODEL", model)))
    out = Path(file_path(values, "OUT") or OUTPUTS / "trace-update")
    check_room(out)
    return TraceRequest(jobs, length, values, out)


def composed(job: Job) -> "DictConfig":
    """Return the configuration of a job, or refuse what cannot be traced."""
    config = compose(job, Path("out"))
    check_supported(config)
    check_traceable(config)
    validate(job, config, here=False)
    return config


def traced(job: Job, config: "DictConfig", length: int | None) -> Trace:
    """Return the trace of a job, or refuse it by its name."""
    try:
        return trace_job(config, length, CPU_PLATFORM)
    except Refused as error:
        raise Refused(f"EXPERIMENT={job.experiment} PRECISION={job.precision}: {error}") from error


def row(job: Job, config: "DictConfig", trace: Trace) -> list[object]:
    """Return the cells of a traced job."""

    def sent(collectives: list[Collective]) -> str:
        return "<br>".join(f"{each.operator} {each.dtype}: {each.size / 1e9:,.1f}" for each in collectives)

    def pair(traced: int, planned: int) -> str:
        return f"{traced / GIB:.1f} ({planned / GIB:.1f})"

    resident = trace.planned.resident
    return [
        *(f"{config.actor_rollout_ref.model.path} ({job.experiment})", trace.ranks, job.precision),
        *(sent(trace.micro_batch), trace.planned.micro_batches, sent(trace.sync)),
        *(pair(trace.weights, resident["weights"]), pair(trace.adam, resident["Adam"])),
        pair(trace.peak, trace.planned_peak),
    ]


def markdown(rows: list[list[object]], command: str) -> str:
    """Return the page."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    sizes = ["weights", "Adam", "peak without Adam"]
    header = [
        "model (experiment)",
        "GPUs",
        "regime",
        "gathered and reduced for a micro-batch, GB",
        "micro-batches",
        "weights to the rollout, GB",
    ]
    lines = [
        "# What GPUs send each other, and their memory, traced without GPUs",
        "",
        f"Written by `{command}` on a CPU, with {versions}.",
        "",
        "**No GPU was used, and nothing was sent.** verl's patched engine updated the actor as one of the GPUs' ranks",
        "(rank 1) under FSDP2, on tensors with shapes and dtypes but no data; torch's fake process group answered for",
        "the other ranks. GB are of whole tensors: a GPU receives all of them but its own share. Where ranks outnumber",
        "experts, rank 1 has one expert, and those beyond the experts have padding.",
        "",
        *markdown_table(header, [row[:6] for row in rows]),
        "",
        "GiB on a GPU during an update, in parentheses by [plan-memory's](../how-to/gpus.md#plan-memory) arithmetic:",
        "",
        *markdown_table(["model (experiment)", "GPUs", "regime", *sizes], [[*row[:3], *row[6:]] for row in rows]),
        "",
        "An update also reduces a few scalars.",
        "",
        "Not traced: what a GPU's kernels take while they run, fragmentation, NCCL's buffers, what overlapping streams",
        "keep longer, and time. Attention takes the tensors of flash-attn 2, also in fp32, which flash-attn lacks. The",
        "gradient of the loss is written over the logits, as by flash-attn's cross entropy.",
    ]
    return "\n".join(lines) + "\n"


def main(request: TraceRequest) -> int:
    from tqdm import tqdm

    configs = [composed(job) for job in request.jobs]
    rows = []
    with several_at_once() as pool, tqdm(total=len(configs), unit="job") as bar:
        traces = pool.map(lambda job, config: traced(job, config, request.length), request.jobs, configs)
        for job, config, trace in zip(request.jobs, configs, traces, strict=True):
            rows.append(row(job, config, trace))
            bar.update()
            bar.write(f"{job.experiment}, {job.precision}: {trace}")
    settings = (f"{name}={shlex.quote(value)}" for name, value in request.values.items() if name != "OUT")
    page = markdown(rows, spelled(" ".join(["make trace-update", *settings])))
    request.out.mkdir(parents=True, exist_ok=True)
    (request.out / "trace-update.md").write_text(page)
    print(request.out / "trace-update.md")
    return 0
