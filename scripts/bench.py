"""Measure what a precision costs: the optimizer step of verl's FSDP engine, and on a GPU the whole training step.

The regimes alternate in one process on the same parameters, so that what slows the machine slows all of them; a ratio
is the median over the rounds of a regime's time over bf16's in the same round. Writes CSV, Markdown and PNG.
"""

import argparse
import csv
import importlib.metadata
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from lib.bench.interleave import machine, rounds
from lib.paths import REPO
from lib.run.job import CPU_PLATFORM

WIDTH = 1024  # a parameter of 2**20 elements, about the size and the number that models of these sizes have
SCALE, CLIP, GRADIENT = 1024.0, 1.0, 1e-3  # the gradients' norm is above CLIP from 10 million parameters on
OPTIMIZERS = {"foreach AdamW": False, "fused AdamW": True}  # and whether it is fused
REGIMES = ("bf16", "fp16", "fp16 upstream", "fp32")
NEEDED = {"norm": 4, "step": 28}  # bytes a parameter: read g; read p, g, m, v and write p, m, v; all in fp32
LEAST_ROUNDS = 41


@dataclass(frozen=True)
class Row:
    """One regime in one configuration; ``seconds`` is the median over ``rounds``, ``ratio`` that to bf16."""

    what: str
    optimizer: str
    parameters_m: float
    ranks: int
    regime: str
    seconds: float
    ratio: float
    rounds: int
    peak_gib: float | None = None


def fully_sharded(millions: float) -> torch.nn.Module:
    """fp32 masters under FSDP2, as verl's actor has them."""
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(round(millions))))
    for layer in module:
        fully_shard(layer)
    return fully_shard(module)


def upstream_step(engine: SimpleNamespace, scaler: torch.amp.GradScaler) -> float:
    """verl 0.9.1's sequence of calls in fp16."""
    from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

    scaler.unscale_(engine.optimizer)
    norm = fsdp2_clip_grad_norm_(engine.module.parameters(), max_norm=CLIP)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    scaler.step(engine.optimizer)
    scaler.update()
    return norm.item()


def optimizer_steps(module: torch.nn.Module, fused: bool, device: str) -> dict[str, Callable[[], float]]:
    """For each regime the step that verl's engine takes, on one set of parameters and Adam states."""
    from verl.utils.precision import GradScalerConfig, LossScaler
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    def engine(scaler):
        made = object.__new__(FSDPEngine)  # its step alone is measured
        made.module, made.optimizer, made.scaler, made._qat_enabled = module, optimizer, scaler, False
        made.optimizer_config = SimpleNamespace(clip_grad=CLIP)
        return made

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=fused, foreach=not fused)
    scaler = LossScaler(GradScalerConfig(init_scale=SCALE), device=device)
    # torch's ShardedGradScaler raises with a fused optimizer: without it upstream has this sequence, and no all-reduce.
    theirs = (torch.amp.GradScaler if fused else ShardedGradScaler)(device, init_scale=SCALE, growth_interval=10**9)
    for each in (scaler, theirs):
        each.scale(torch.zeros((), device=device))
    plain = engine(None)
    return {
        "bf16": plain.optimizer_step,
        "fp16": engine(scaler).optimizer_step,
        "fp16 upstream": lambda: upstream_step(plain, theirs),
        "fp32": plain.optimizer_step,  # the same code: what it differs from 1 is the noise
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def fill_gradients(module: torch.nn.Module, regime: str) -> None:
    value = GRADIENT * (SCALE if regime.startswith("fp16") else 1.0)
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        local(parameter.grad).fill_(value)


def alternate(
    takes: dict[str, Callable[[], float]], prepare: Callable[[str], None], seconds: float, device: str
) -> dict[str, list[float]]:
    """Seconds of every take, round by round, each round in an order of its own, until ``seconds`` are over."""

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    times: dict[str, list[float]] = {name: [] for name in takes}
    found = rounds(takes, wait, prepare)  # in the same orders on every rank
    next(found)  # Adam's state is made, kernels are loaded
    begin, more = time.monotonic(), torch.ones(1)
    while more.item():
        for name, taken in next(found).items():
            times[name].append(taken)
        over = time.monotonic() - begin > seconds and len(times[name]) >= LEAST_ROUNDS
        more.fill_(not over)
        dist.broadcast(more, 0)  # rank 0's clock decides for all
    return times


def rows_of(times: dict[str, list[float]], peaks: dict[str, float] | None = None, **facts) -> list[Row]:
    ratios = {name: [t / base for t, base in zip(times[name], times["bf16"], strict=True)] for name in times}
    return [
        Row(
            **facts,
            regime=name,
            seconds=statistics.median(times[name]),
            ratio=statistics.median(ratios[name]),
            rounds=len(times[name]),
            peak_gib=peaks and peaks[name],
        )
        for name in times
    ]


def join(store: str, rank: int, ranks: int, device: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "",
        "MASTER_PORT": "",
    }
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)


def measure_steps(rank: int, store: str, ranks: int, sizes: list[int], seconds: float, device: str, queue) -> None:
    """A rank of the optimizer benchmark; rank 0 puts its rows into ``queue``."""
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    join(store, rank, ranks, device)
    torch.set_default_device(device)
    for size in sizes:
        for name, fused in OPTIMIZERS.items():
            module = fully_sharded(size)
            takes = optimizer_steps(module, fused, device)
            times = alternate(takes, lambda regime, module=module: fill_gradients(module, regime), seconds, device)
            if rank == 0:
                rows = rows_of(times, what="optimizer step", optimizer=name, parameters_m=size, ranks=ranks)
                queue.put(rows)
                print(line_of(rows), flush=True)
            del module, takes
    dist.destroy_process_group()


def measure_training(rank: int, store: str, seconds: float, device: str, layers: int, width: int, queue) -> None:
    """The whole training step of verl's worker: forward, backward and optimizer step of a Qwen2 model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from recipes.arithmetic.model import build_tokenizer
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    join(store, rank, 1, device)
    tokenizer = build_tokenizer()
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    config = Qwen2Config(vocab_size=32000, num_attention_heads=16, num_key_value_heads=16, **shape)
    config.eos_token_id = config.pad_token_id = tokenizer.pad_token_id
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        model = Qwen2ForCausalLM(config)
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        model.save_pretrained(folder)
        del model

        def worker(dtype: str) -> TrainingWorker:
            made = TrainingWorker(
                TrainingWorkerConfig(
                    model_type="language_model",
                    model_config=HFModelConfig(
                        path=folder, use_remove_padding=False, override_config={"attn_implementation": "sdpa"}
                    ),
                    engine_config=FSDPEngineConfig(
                        strategy="fsdp2",
                        dtype=dtype,
                        use_dynamic_bsz=False,
                        micro_batch_size_per_gpu=8,
                        use_torch_compile=False,
                    ),
                    optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=10**6, clip_grad=CLIP),
                )
            )
            made.reset()
            made.set_loss_fn(lambda model_output, data, dp_group=None: (-model_output["log_probs"].values().mean(), {}))
            return made

        length = 512 if device == "cuda" else 16
        rows = list(torch.randint(0, 256, (8, length)))
        nested = lambda make: torch.nested.as_nested_tensor([make(r) for r in rows], layout=torch.jagged)  # noqa: E731

        def step(trained: TrainingWorker) -> None:
            data = {
                "input_ids": nested(lambda r: r),
                "position_ids": nested(lambda r: torch.arange(len(r))),
                "loss_mask": nested(lambda r: torch.ones(len(r))),
            }
            trained.train_batch(tu.get_tensordict(data, {"temperature": 1.0, "update_lr_scheduler": True}))

        workers = {"bf16": worker("bfloat16"), "fp16": worker("float16"), "fp32": worker("float32")}
        peaks = {}
        if device == "cuda":
            for name, trained in workers.items():
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
                step(trained)
                step(trained)
                peaks[name] = (torch.cuda.max_memory_allocated() - held) / 2**30
        takes = {name: lambda trained=trained: step(trained) for name, trained in workers.items()}
        times = alternate(takes, lambda name: None, seconds, device)
    found = rows_of(
        times, peaks or None, what="training step", optimizer="foreach AdamW", parameters_m=round(millions, 1), ranks=1
    )
    queue.put(found)
    print(line_of(found), flush=True)
    dist.destroy_process_group()


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write: every tensor they take, and every one that they change or make."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if any(r.alias_info and not r.alias_info.is_write for r in returns):  # a view moves nothing
            return result
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            self.bytes += size_of(given.get(argument.name)) * (2 if written else 1)
        if not func.name().startswith("aten::empty") and not any(r.alias_info for r in returns):
            self.bytes += size_of(result)
        return result


def size_of(value) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(size_of, value)) if isinstance(value, (list, tuple)) else 0


def count_traffic(rank: int, store: str, queue) -> None:
    """Bytes a parameter that a step moves, by optimizer and regime; counted, so the machine does not matter."""
    join(store, rank, 1, "cpu")
    found = []
    for name, fused in OPTIMIZERS.items():
        module = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        for regime, step in optimizer_steps(module, fused, "cpu").items():
            fill_gradients(module, regime)
            step()  # Adam's state is made
            fill_gradients(module, regime)
            with Traffic() as counted:
                step()
            found.append(((name, regime), counted.bytes / WIDTH**2))
    queue.put(found)
    dist.destroy_process_group()


def line_of(rows: list[Row]) -> str:
    first = rows[0]
    regimes = ", ".join(f"{row.regime} {row.ratio:.3f}" for row in rows[1:])
    where = f"{first.what}, {first.optimizer}, {first.parameters_m:g} M, {first.ranks} rank(s)"
    return f"{where}: bf16 {first.seconds * 1e3:.1f} ms; × bf16: {regimes}; {first.rounds} rounds"


def write(rows: list[Row], moved: dict[tuple[str, str], float], device: str, out: Path) -> list[Path]:
    """``cost-DEVICE.csv``, ``.md`` and ``.png``."""
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"cost-{device}.{suffix}" for suffix in ("csv", "md", "png")]
    with files[0].open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Row)])
        table.writeheader()
        table.writerows(asdict(row) for row in rows)
    files[1].write_text(markdown(rows, moved, device))
    plot(rows, machine(device), files[2])
    return files


def markdown(rows: list[Row], moved: dict[tuple[str, str], float], device: str) -> str:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "verl")}
    lines = [
        "# What fp16 costs",
        "",
        f"Measured by `make bench` on {machine(device)}; Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ".",
        "",
        "Ratios are to bf16 in the same round, the median over the rounds; below 1 is faster. fp32 runs bf16's code:",
        "its distance from 1 is the noise. `fp16 upstream` is verl's sequence (unscale, clip, step, update); with",
        "fused AdamW it takes torch's `GradScaler`, because `ShardedGradScaler`, which verl uses, raises there.",
        "",
    ]
    for what in dict.fromkeys(row.what for row in rows):
        of = [row for row in rows if row.what == what]
        regimes = list(dict.fromkeys(row.regime for row in of))
        memory = "" if of[0].peak_gib is None else " peak GiB above the weights |"
        lines += [
            f"## The {what}",
            "",
            f"| optimizer | M parameters | ranks | bf16 ms | {' | '.join(regimes[1:])} | rounds |{memory}",
        ]
        lines += ["|" + "---|" * (5 + len(regimes) - 1 + bool(memory))]
        configurations = dict.fromkeys((row.optimizer, row.parameters_m, row.ranks) for row in of)
        for configuration in configurations:
            same = [row for row in of if (row.optimizer, row.parameters_m, row.ranks) == configuration]
            optimizer, size, ranks = configuration
            cells = [
                optimizer,
                f"{size:g}",
                ranks,
                f"{same[0].seconds * 1e3:.1f}",
                *(f"{r.ratio:.3f}" for r in same[1:]),
            ]
            cells += [same[0].rounds]
            if memory:
                cells += [", ".join(f"{row.regime} {row.peak_gib:.2f}" for row in same)]
            lines += ["| " + " | ".join(map(str, cells)) + " |"]
        lines += [""]
    if not any(row.what == "training step" for row in rows):
        lines += ["## The training step", "", "Not measured: no CUDA device.", ""]
    lines += [
        "## Bytes moved a parameter",
        "",
        "Counted over the operators of a step, every tensor that one reads and every one that it writes. Needed are "
        f"{NEEDED['norm']} for the norm and {NEEDED['step']} for one pass of AdamW: {sum(NEEDED.values())}.",
        "",
        f"| optimizer | {' | '.join(REGIMES)} |",
        "|" + "---|" * (len(REGIMES) + 1),
    ]
    for optimizer in dict.fromkeys(name for name, _ in moved):
        lines += [f"| {optimizer} | " + " | ".join(f"{moved[optimizer, regime]:.1f}" for regime in REGIMES) + " |"]
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], title: str, file: Path) -> None:
    """The ratios to bf16, a panel an optimizer, a line a regime over the sizes; dashed on two ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [row for row in rows if row.what == "optimizer step"]
    optimizers = list(dict.fromkeys(row.optimizer for row in steps))
    figure, axes = plt.subplots(1, len(optimizers), figsize=(10, 4), sharey=True, layout="constrained", squeeze=False)
    colours = {"fp16": "tab:blue", "fp16 upstream": "tab:red", "fp32": "tab:grey"}
    for axis, optimizer in zip(axes[0], optimizers, strict=True):
        axis.axhline(1.0, color="black", linewidth=0.8)
        for regime, colour in colours.items():
            for ranks, style in zip(sorted({row.ranks for row in steps}), ("o-", "s--"), strict=False):
                line = [r for r in steps if (r.optimizer, r.regime, r.ranks) == (optimizer, regime, ranks)]
                label = f"{regime}, {ranks} rank{'s' * (ranks > 1)}"
                axis.plot([r.parameters_m for r in line], [r.ratio for r in line], style, color=colour, label=label)
        axis.set(title=optimizer, xlabel="million parameters", xscale="log")
        axis.set_xticks(
            sorted({row.parameters_m for row in steps}), [f"{s:g}" for s in sorted({r.parameters_m for r in steps})]
        )
        axis.minorticks_off()
    axes[0, 0].set_ylabel("time of the optimizer step, × bf16")
    axes[0, 0].legend(fontsize="small", ncols=2)
    figure.suptitle(title)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def spawn(worker: Callable[..., None], ranks: int, *args) -> list:
    """Run ``worker(rank, store, …, queue)`` in ``ranks`` processes; what rank 0 put into the queue."""
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        torch.multiprocessing.spawn(worker, (f"{folder}/store", *args, queue), nprocs=ranks)
        found = []
        while not queue.empty():
            found += queue.get()
    return found


def above_zero(text: str) -> list[int]:
    values = [int(word) for word in text.split(",")]
    if min(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: whole numbers above 0, separated by commas")
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=above_zero, default=[10, 30, 100, 300], help="million parameters")
    parser.add_argument("--ranks", type=above_zero, default=[1, 2], help="on a GPU one alone")
    parser.add_argument("--seconds", type=float, default=25.0, help="for each configuration, 41 rounds at least")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "results")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sys.path.append(str(REPO))
    if device == "cpu":
        os.environ |= CPU_PLATFORM
    rows = []
    for ranks in given.ranks if device == "cpu" else [1]:
        rows += spawn(measure_steps, ranks, ranks, given.sizes, given.seconds, device)
    if device == "cuda":
        rows += spawn(measure_training, 1, given.seconds, device, 24, 1024)
    print(*write(rows, dict(spawn(count_traffic, 1)), device, given.out), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
