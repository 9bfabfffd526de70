"""Measure what fp16 and bf16 give to training outside verl, against fp32: time, memory and what is learned.

    scripts/bench_amp.py                                       all scenarios, into docs/results; 3 minutes on 2 cores
    scripts/bench_amp.py --only mlp,ppo --repeats 7 --out DIR

Three arms of a scenario train side by side from the same weights, on the same data, clipped alike, and take turns at
every update, each round in an order of its own. A repeat has a seed of its own. What an arm computes in is observed by
``FP16Trainer``, not read from a config, and where it is not what was asked for there is no speed-up. The first two
updates are not timed. Writes CSV, Markdown and PNG.
"""

import csv
import gc
import hashlib
import itertools
import math
import os
import platform
import re
import shlex
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median
from typing import Any, Optional

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lib.bench.interleave import machine, rounds
from lib.format import significant as written
from lib.paths import REPO

sys.path.append(str(REPO))
from recipes.amp import options
from recipes.amp.evolution import Policy, cloning_loss, play
from recipes.amp.options import option
from recipes.amp.ppo import KILL_SWITCH, PPO, PPOConfig
from recipes.amp.trainer import FP16Trainer, FP16TrainingConfig
from recipes.amp.world_model import WorldModel, collect, make_env, world_model_loss
from verl.utils.precision import to_dtype

BASE = "fp32"
ARMS = {BASE: "float32", "fp16": "float16", "bf16": "bfloat16"}
LEAST_REPEATS = 5
LAST = 5  # updates over which the final loss is a mean
CLIP = 1.0
BUSY = 0.05  # of the cores; where other processes use more, times are not to be quoted
MIB = 2**20


@dataclass(frozen=True)
class Arm:
    """How a scenario trains in one repeat: its dtype, its seed and the device.

    Args:
        on_cpu: whether 16 bits are insisted on where the device is a CPU.
    """

    dtype: str
    seed: int
    device: torch.device
    on_cpu: bool = True

    def trainer(self, model: torch.nn.Module, lr: float) -> FP16Trainer:
        """``model``, on the arm's device, under fused AdamW."""
        model.to(self.device)
        config = FP16TrainingConfig(dtype=self.dtype, on_cpu=self.on_cpu, max_grad_norm=CLIP)
        return FP16Trainer(model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True), config)


@dataclass(frozen=True)
class Run:
    """An arm that is built.

    Attributes:
        update: what is timed; returns the loss, 0-d, or the return, ``None`` where no episode has ended.
        items: what one update goes through, in the scenario's unit.
    """

    trainer: FP16Trainer
    update: Callable[[], Any]
    items: int


def training(trainer: FP16Trainer, batches: Iterable[Any], loss: Callable, items: int) -> Run:
    """One ``training_step`` an update, over the batches again and again."""
    endless = itertools.cycle(batches)
    return Run(trainer, lambda: trainer.training_step(next(endless), loss), items)


def mlp(arm: Arm, width: int, layers: int, batch: int, inputs: int = 64, batches: int = 8) -> Run:
    """Regression on the sines of random projections, by a wide multilayer perceptron."""
    x = torch.randn(batches, batch, inputs, device=arm.device)
    y = (x @ torch.randn(inputs, inputs, device=arm.device) / inputs**0.5).sin()
    sizes = [inputs, *[width] * layers, inputs]
    modules = [part for pair in itertools.pairwise(sizes) for part in (torch.nn.Linear(*pair), torch.nn.GELU())][:-1]

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1])

    return training(arm.trainer(torch.nn.Sequential(*modules), 1e-3), list(zip(x, y, strict=True)), loss, batch)


class CausalTransformer(torch.nn.Module):
    """torch's own encoder layers under a causal mask."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int):
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.positions = torch.nn.Parameter(torch.randn(length, width) * 0.02)
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens (B, T) -> logits (B, T, V)."""
        hidden = self.layers(self.tokens(tokens) + self.positions, mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


def transformer(
    arm: Arm, vocabulary: int, width: int, layers: int, heads: int, length: int, batch: int, batches: int = 8
) -> Run:
    """The next token of arithmetic progressions modulo the vocabulary, whose step differs from row to row."""
    start = torch.randint(vocabulary, (batches, batch, 1), device=arm.device)
    step = torch.randint(1, 17, (batches, batch, 1), device=arm.device)
    rows = (start + step * torch.arange(length + 1, device=arm.device)) % vocabulary

    def loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())

    model = CausalTransformer(vocabulary, width, layers, heads, length)
    return training(arm.trainer(model, 3e-4), list(rows), loss, batch * length)


def world_model(arm: Arm, hidden: int, latent: int, batch: int, length: int, batches: int = 4) -> Run:
    """A step of the world model, on stretches of Pendulum-v1."""
    data = collect("Pendulum-v1", batches * batch * length, arm.seed, length)
    model = WorldModel(data.observations.shape[-1], data.actions.shape[-1], hidden, latent)
    model.set_statistics(data)
    stretches = [data.at(rows).to(arm.device) for rows in torch.randperm(len(data.rewards)).split(batch)]
    return training(arm.trainer(model, 1e-3), stretches, world_model_loss, batch * length)


def evolution(arm: Arm, hidden: int, batch: int, episodes: int = 16, batches: int = 4) -> Run:
    """A step of a member's training: it clones what it played on CartPole-v1, weighted by return."""
    env, rng = make_env("CartPole-v1"), np.random.default_rng(arm.seed)
    policy = Policy(env, hidden)
    played = [play(env, policy, arm.seed + number, rng) for number in range(episodes)]
    observations = torch.from_numpy(np.concatenate([each.observations for each in played]))
    actions = torch.from_numpy(np.concatenate([each.actions for each in played]))
    returns = torch.cat([torch.full((len(each.actions),), each.total) for each in played])
    rows = torch.randint(len(actions), (batches, batch))
    drawn = [[values[of].to(arm.device) for values in (observations, actions, returns / returns.mean())] for of in rows]
    return training(arm.trainer(policy, 1e-3), drawn, cloning_loss, batch)


def ppo(arm: Arm, **settings: int) -> Run:
    """``PPO.iterate`` on CartPole-v1: a rollout and the updates on it."""
    amp = arm.dtype != ARMS[BASE]
    device = "auto" if arm.device.type == "cpu" and not arm.on_cpu else arm.device.type
    steps = settings["num_envs"] * settings["num_steps"]
    settings |= {"seed": arm.seed, "total_steps": steps, "anneal": False, "device": device, "use_amp": amp}
    made = PPO(PPOConfig(dtype=arm.dtype if amp else "float16", **settings))
    return Run(made.trainer, lambda: made.iterate()["return_mean"], steps)


@dataclass(frozen=True)
class Scenario:
    """What is trained.

    Attributes:
        build: ``(arm, **size) -> Run``; draws from torch's global generator, which is seeded before.
        unit: of the throughput, a second.
        sizes: by preset the arguments of ``build``, and how many ``updates`` are timed.
        outcome: what an update returns: "loss" or "return".
    """

    build: Callable[..., Run]
    unit: str
    sizes: dict[str, dict[str, int]]
    outcome: str = "loss"


SCENARIOS = {
    "mlp": Scenario(
        mlp,
        "samples",
        {
            "small": {"width": 64, "layers": 2, "batch": 32, "updates": 4},
            "cpu": {"width": 512, "layers": 3, "batch": 512, "updates": 10},
            "cuda": {"width": 4096, "layers": 6, "batch": 32768, "updates": 20},
        },
    ),
    "transformer": Scenario(
        transformer,
        "tokens",
        {
            "small": {"vocabulary": 64, "width": 32, "layers": 1, "heads": 2, "length": 16, "batch": 4, "updates": 4},
            "cpu": {"vocabulary": 256, "width": 128, "layers": 2, "heads": 4, "length": 64, "batch": 8, "updates": 10},
            "cuda": {
                "vocabulary": 8192,
                "width": 1024,
                "layers": 12,
                "heads": 16,
                "length": 1024,
                "batch": 8,
                "updates": 20,
            },
        },
    ),
    "world_model": Scenario(
        world_model,
        "steps",
        {
            "small": {"hidden": 32, "latent": 8, "batch": 4, "length": 20, "updates": 4},
            "cpu": {"hidden": 256, "latent": 64, "batch": 32, "length": 50, "updates": 10},
            "cuda": {"hidden": 2048, "latent": 512, "batch": 512, "length": 50, "updates": 30},
        },
    ),
    "evolution": Scenario(
        evolution,
        "steps",
        {
            "small": {"hidden": 32, "batch": 64, "updates": 4},
            "cpu": {"hidden": 1024, "batch": 2048, "updates": 20},
            "cuda": {"hidden": 8192, "batch": 65536, "updates": 30},
        },
    ),
    "ppo": Scenario(
        ppo,
        "steps",
        {
            "small": {
                "hidden": 16,
                "layers": 1,
                "num_envs": 4,
                "num_steps": 32,
                "epochs": 1,
                "minibatches": 2,
                "updates": 3,
            },
            "cpu": {
                "hidden": 256,
                "layers": 2,
                "num_envs": 32,
                "num_steps": 64,
                "epochs": 4,
                "minibatches": 4,
                "updates": 6,
            },
            "cuda": {
                "hidden": 2048,
                "layers": 3,
                "num_envs": 4096,
                "num_steps": 32,
                "epochs": 8,
                "minibatches": 4,
                "updates": 6,
            },
        },
        outcome="return",
    ),
}


class Alive(TorchDispatchMode):
    """Bytes of the tensors alive at once, of those made in its context; what a kernel needs inside is not seen."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.storages:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata)
        return out

    def _gone(self, key: int) -> None:
        self.now -= self.storages.pop(key)


@contextmanager
def memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """The most bytes of tensors, of those made in this context, that were alive at once; on a GPU its allocator's."""
    if device.type == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield lambda: torch.cuda.max_memory_allocated() - before
    else:
        with Alive() as alive:
            yield lambda: alive.peak


MEMORY = {
    "cpu": "the most bytes of tensors alive at once, from the first weight to the second update; what kernels need "
    "inside is not in it",
    "cuda": "torch.cuda.max_memory_allocated, from the first weight to the second update, above what was there before",
}


def gpu_busy(update: Callable[[], Any]) -> float:
    """The share of one update's time in which the GPU computes."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        begin = time.perf_counter()
        update()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begin
    on_gpu = (event for event in profiled.key_averages() if event.device_type == DeviceType.CUDA)
    microseconds = sum(event.self_device_time_total for event in on_gpu if not event.is_user_annotation)
    return microseconds / 1e6 / wall


@dataclass(frozen=True)
class Row:
    """One arm of a scenario in one repeat.

    Attributes:
        order: the arm's place in each timed round, from 0.
        weights: a digest of those it began with.
        effective_share: of the multiplications of the first forward, in ``effective_dtype``.
        overflow_steps: of all ``optimizer_steps``, warm-up included.
        seconds: an update's, the median over the ``updates`` that were timed.
        throughput: in ``unit`` a second.
        gpu_busy: the share of an update in which the GPU computes.
        first, last: the loss or the return: of the first update, and the mean over the last ``LAST``.
    """

    scenario: str
    arm: str
    repeat: int
    seed: int
    order: str
    weights: str
    max_grad_norm: float
    requested_dtype: str
    effective_dtype: Optional[str]
    effective_share: Optional[float]
    fallback: Optional[str]
    optimizer_steps: int
    overflow_steps: int
    updates: int
    seconds: float
    throughput: float
    unit: str
    memory_mib: float
    gpu_busy: Optional[float]
    outcome: str
    first: float
    last: float

    @property
    def astray(self) -> str:
        """Why the arm is not what it is called; "" where it is."""
        if self.fallback:
            return self.fallback
        if self.effective_dtype != self.requested_dtype:
            return f"it ran in {self.effective_dtype}, not in {self.requested_dtype}"
        return ""


def measure(name: str, size: str, repeat: int, seed: int, device: torch.device, on_cpu: bool = True) -> list[Row]:
    """All arms of a scenario, in one repeat.

    Args:
        size: "small", "cpu" or "cuda".
        on_cpu: see :class:`Arm`.
    """
    scenario = SCENARIOS[name]
    shape = dict(scenario.sizes[size])
    updates = shape.pop("updates")
    runs: dict[str, Run] = {}
    peaks: dict[str, int] = {}
    weights: dict[str, str] = {}
    seen: dict[str, list[Any]] = {arm: [] for arm in ARMS}

    def take(arm: str) -> None:
        seen[arm].append(runs[arm].update())

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for arm, dtype in ARMS.items():
        torch.manual_seed(seed)
        with memory(device) as peak:
            runs[arm] = scenario.build(Arm(dtype, seed, device, on_cpu), **shape)
            weights[arm] = digest(runs[arm].trainer.module)
            take(arm)  # the dtype is observed, Adam's state is made, kernels are loaded
            take(arm)
            peaks[arm] = peak()
    takes = {arm: lambda arm=arm: take(arm) for arm in ARMS}
    times = list(itertools.islice(rounds(takes, wait, seed=seed), updates))
    found = []
    for arm, run in runs.items():
        stats, shown = run.trainer.get_stats(), [math.nan if value is None else float(value) for value in seen[arm]]
        seconds = median(taken[arm] for taken in times)
        row = Row(
            scenario=name,
            arm=arm,
            repeat=repeat,
            seed=seed,
            order=" ".join(str(list(taken).index(arm)) for taken in times),
            weights=weights[arm],
            max_grad_norm=run.trainer.config.max_grad_norm,
            requested_dtype=ARMS[arm],
            effective_dtype=stats["effective_dtype"],
            effective_share=next(iter(stats["effective_dtype_share"].values()), None),
            fallback=stats["fallback"],
            optimizer_steps=stats["training_steps"],
            overflow_steps=stats["overflow_steps"],
            updates=updates,
            seconds=seconds,
            throughput=run.items / seconds,
            unit=scenario.unit,
            memory_mib=peaks[arm] / MIB,
            gpu_busy=gpu_busy(run.update) if device.type == "cuda" else None,
            outcome=scenario.outcome,
            first=shown[0],
            last=fmean(shown[-min(LAST, updates) :]),
        )
        found.append(row)
    return found


def digest(module: torch.nn.Module) -> str:
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()[:12]


@dataclass(frozen=True)
class Ratio:
    """A number of ``BASE`` over an arm's in the same repeat: the median over the repeats and its range, or why not."""

    median: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str = ""

    @property
    def less(self) -> str:
        """As what the arm needs less, in percent."""
        return "n/a" if self.reason else f"{1 - 1 / self.median:.0%}"

    def __str__(self) -> str:
        return "n/a" if self.reason else f"{written(self.median)} ({written(self.low)}–{written(self.high)})"


def ratio(rows: list[Row], scenario: str, arm: str, of: Callable[[Row], float]) -> Ratio:
    """``of(BASE's row) / of(arm's row)`` over the repeats; n/a where one of the two is not what it is called."""
    by = {name: [row for row in rows if (row.scenario, row.arm) == (scenario, name)] for name in (BASE, arm)}
    for name, several in by.items():
        for row in several:
            if row.astray:
                return Ratio(reason=row.astray if name == arm else f"{BASE}: {row.astray}")
    values = [of(base) / of(other) for base, other in zip(by[BASE], by[arm], strict=True)]
    return Ratio(median(values), min(values), max(values))


def seconds_of(row: Row) -> float:
    return row.seconds


def memory_of(row: Row) -> float:
    return row.memory_mib


@dataclass(frozen=True)
class Facts:
    """Where and how it was measured, for the report.

    Attributes:
        others: cores that other processes used meanwhile, on average.
    """

    device: str
    size: str
    command: str
    seconds: float
    others: float


def cpu_seconds() -> tuple[float, float]:
    """What all processes have used of all cores, from Linux's /proc/stat, and this one alone."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK"), time.process_time()


def bench(
    names: Iterable[str], size: str, repeats: int, seed: int, device: torch.device, on_cpu: bool = True
) -> list[Row]:
    """The scenarios, one after the other; a line is printed a repeat, whose seed is ``seed`` + its number."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # fp32 is to be fp32
    if device.type == "cuda":  # cuBLAS's workspace stays allocated: it is to be counted to no arm
        for dtype in ARMS.values():
            some = torch.ones(64, 64, device=device, dtype=to_dtype(dtype, "dtype"))
            torch.nn.functional.linear(some, some, some[0])
    rows: list[Row] = []
    for name in names:
        for repeat in range(repeats):
            begin = time.monotonic()
            found = measure(name, size, repeat, seed + repeat, device, on_cpu)
            times = [f"{BASE} {written(found[0].seconds * 1e3)} ms"]
            for row in found[1:]:
                gain = ratio(found, name, row.arm, seconds_of)
                gain = f"n/a: {gain.reason}" if gain.reason else f"{written(gain.median)}×"
                times.append(f"{row.arm} {written(row.seconds * 1e3)} ms ({gain})")
            took = time.monotonic() - begin
            print(f"{name} {repeat + 1}/{repeats}: {', '.join(times)}; {took:.0f} s", flush=True)
            rows += found
    return rows


def write(rows: list[Row], facts: Facts, out: Path) -> list[Path]:
    """``amp-bench-MACHINE.csv``, ``.md`` and ``.png`` into a folder, MACHINE being ``cpu`` or the GPU's name."""
    where = "cpu" if facts.device == "cpu" else re.sub(r"[^a-z0-9]+", "-", machine(facts.device).lower())
    files = [out / f"amp-bench-{where}.{suffix}" for suffix in ("csv", "md", "png")]
    with files[0].open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(row) for row in rows)
    files[1].write_text(markdown(rows, facts))
    plot(rows, machine(facts.device), files[2])
    return files


def scenarios_in(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.scenario for row in rows))


def cpu_extensions() -> str:
    """The instructions for 16 bits that this CPU has, as Linux names them."""
    flags = set(re.findall(r"\b(?:avx512_(?:bf16|fp16)|amx_(?:bf16|fp16))\b", Path("/proc/cpuinfo").read_text()))
    return f"for 16 bits the CPU has {', '.join(sorted(flags))}" if flags else "the CPU has no instructions for 16 bits"


def markdown(rows: list[Row], facts: Facts) -> str:
    names = scenarios_in(rows)
    repeats = 1 + max(row.repeat for row in rows)
    cores = os.cpu_count()
    where = machine(facts.device) + (f" ({cpu_extensions()})" if facts.device == "cpu" else "; TF32 is off")
    lines = [
        "# What 16 bits give to training outside verl",
        "",
        f"Measured by `{facts.command}` on {where}; {torch.get_num_threads()} threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}; {datetime.now(timezone.utc):%Y-%m-%d}, "
        f"{facts.seconds / 60:.1f} minutes, in which other processes used {facts.others:.2f} of {cores} cores.",
        "",
    ]
    if facts.others > BUSY * cores:
        lines += ["**The machine was busy with other work: the times are rough, do not quote them.**", ""]
    lines += [
        f"{repeats} repeats, each with its own seed. In a repeat the arms have the same first weights, the same data "
        "and the same clipping, and take turns at every update, in an order that is shuffled each round. Each arm's "
        "first two updates are not timed.",
        "",
        f"- speed-up: {BASE}'s seconds an update over the arm's, in the same repeat; the median over the repeats, and "
        "their range. Above 1 is faster. n/a: the arm did not run in its dtype.",
        "- effective dtype: what the multiplications of the first forward were done in, and their share, as observed.",
        f"- memory: {MEMORY[facts.device]}. Saved: of {BASE}'s, in the median.",
        f"- first, last: the loss or the return of the first update, and the mean of the last {LAST}; mean over the "
        "repeats, and their range.",
        "- overflow: optimizer steps that were skipped, of all, warm-up too: so many less to learn from. An update of "
        "ppo is a rollout and all optimizer steps on it.",
        "",
        "| scenario | arm | effective dtype | ms an update | throughput a second | speed-up | memory MiB | saved | "
        "overflow | first | last |" + (" GPU busy |" if facts.device == "cuda" else ""),
        "|" + "---|" * (12 if facts.device == "cuda" else 11),
    ]
    notes: list[str] = []
    for name in names:
        for arm in ARMS:
            of = [row for row in rows if (row.scenario, row.arm) == (name, arm)]
            speed, memory_ratio = ratio(rows, name, arm, seconds_of), ratio(rows, name, arm, memory_of)
            if speed.reason:
                notes.append(f"- {name}, {arm}: {speed.reason}")
            share = "" if of[0].effective_share is None else f" {min(row.effective_share for row in of):.1%}"
            cells = [
                name,
                arm,
                f"{of[0].effective_dtype}{share}",
                written(median(row.seconds for row in of) * 1e3),
                f"{written(median(row.throughput for row in of))} {of[0].unit}",
                speed if arm != BASE else "",
                written(median(row.memory_mib for row in of)),
                memory_ratio.less if arm != BASE else "",
                f"{sum(row.overflow_steps for row in of)} of {sum(row.optimizer_steps for row in of)}",
                f"{of[0].outcome} {spread([row.first for row in of])}",
                spread([row.last for row in of]),
            ]
            if facts.device == "cuda":
                cells.append(f"{median(row.gpu_busy for row in of):.0%}")
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "## n/a", "", *notes] if notes else []
    lines += ["", "## Sizes", "", *(f"- {sized(name, facts.size)}" for name in names)]
    lines += [
        "",
        "## Not measured",
        "",
        *(f"- {name}: left out of this run" for name in SCENARIOS if name not in names),
    ]
    lines += [f"- other sizes, other machines{'; a GPU: there is none here' if facts.device == 'cpu' else ''}"]
    lines += ["", "## Goals on a GPU", "", *goals(rows, facts)]
    return "\n".join(lines) + "\n"


def sized(name: str, size: str) -> str:
    return f"{name}: " + ", ".join(f"{key} {value}" for key, value in SCENARIOS[name].sizes[size].items())


def spread(values: list[float]) -> str:
    """Their mean, and their range; a loss may have left the finite numbers."""
    if not all(map(math.isfinite, values)):
        return f"not finite in {sum(not math.isfinite(value) for value in values)} of {len(values)} repeats"
    return f"{written(fmean(values))} ({written(min(values))}–{written(max(values))})"


def goals(rows: list[Row], facts: Facts) -> list[str]:
    """What was hoped for on a GPU, and what was measured there."""
    trained = [name for name in SCENARIOS if name != "ppo"]
    hoped = {
        "at least 1.5 × the throughput in PPO, where the GPU is the bottleneck": (["ppo"], seconds_of, str),
        "2 to 3 × the speed in training": (trained, seconds_of, str),
        "40 to 50% less memory": (list(SCENARIOS), memory_of, lambda found: found.less),
    }
    lines = []
    for goal, (names, of, shown) in hoped.items():
        measured = [
            f"{name} {arm} {shown(ratio(rows, name, arm, of))}"
            for name in names
            for arm in ARMS
            if arm != BASE and name in scenarios_in(rows)
        ]
        if facts.device == "cpu":
            lines.append(f"- {goal}: not measured, no CUDA device.")
        else:
            lines.append(f"- {goal}: {'; '.join(measured) or 'not measured'}.")
    if facts.device == "cuda":
        busy = {
            name: median(r.gpu_busy for r in rows if (r.scenario, r.arm) == (name, BASE)) for name in scenarios_in(rows)
        }
        shares = "; ".join(f"{name} {share:.0%}" for name, share in busy.items())
        lines.append(f"- the GPU is the bottleneck as far as it computes during an update in {BASE}: {shares}.")
    return lines


def plot(rows: list[Row], title: str, file: Path) -> None:
    """Speed-up and memory by scenario and arm: the median, and the range over the repeats."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names, colours = scenarios_in(rows), {"fp16": "tab:blue", "bf16": "tab:orange"}
    figure, (speed, memory) = plt.subplots(
        1, 2, figsize=(10, 1.8 + 0.8 * len(names)), sharey=True, layout="constrained"
    )
    for number, (arm, colour) in enumerate(colours.items()):
        for place, name in enumerate(names):
            y, beside = place + 0.4 * number - 0.2, {"textcoords": "offset points", "va": "center", "color": colour}
            gain, less = ratio(rows, name, arm, seconds_of), ratio(rows, name, arm, memory_of)
            if gain.reason:
                for axis, x in ((speed, 1.0), (memory, 0.0)):
                    axis.annotate(f"{arm}: n/a", (x, y), xytext=(6, 0), **beside)
                continue
            ends = [[gain.median - gain.low], [gain.high - gain.median]]
            speed.errorbar(gain.median, y, xerr=ends, fmt="o", color=colour, capsize=4)
            speed.annotate(f"{arm}: {written(gain.median)}×", (gain.median, y), xytext=(0, 10), ha="center", **beside)
            percent = 100 * (1 - 1 / less.median)
            memory.barh(y, percent, height=0.34, color=colour)
            memory.annotate(f"{arm}: {less.less}", (max(percent, 0.0), y), xytext=(8, 0), **beside)
    speed.axvline(1.0, color="black", linewidth=0.8)
    memory.axvline(0.0, color="black", linewidth=0.8)
    speed.set(xscale="log", xlabel=f"speed-up: seconds of {BASE} / seconds\nright of 1 is faster")
    memory.set(xlabel=f"memory saved, % of {BASE}'s")
    speed.margins(x=0.2, y=0.12)
    low, high = speed.get_xlim()
    speed.set_xlim(min(low, 0.8), max(high, 1.25))
    memory.set_xlim(min(memory.get_xlim()[0], 0.0), max(memory.get_xlim()[1] * 1.3, 60.0))
    ticks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
    low, high = speed.get_xlim()
    speed.set_xticks([tick for tick in ticks if low <= tick <= high])
    speed.xaxis.set_major_formatter("{x:g}")
    speed.minorticks_off()
    speed.set_yticks(range(len(names)), names)
    speed.invert_yaxis()
    figure.suptitle(f"Training in 16 bits against {BASE} on {title}: median and range of the repeats")
    figure.savefig(file, dpi=120)
    plt.close(figure)


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    repeats: int = option(LEAST_REPEATS, f"of every scenario, each with its own seed, at least {LEAST_REPEATS}")
    only: Optional[str] = option(None, f"scenarios, separated by commas, of {','.join(SCENARIOS)}")
    size: Optional[str] = option(None, "cpu, cuda, or small, which is for tests; that of the device where not given")
    device: str = option("auto", "auto, cpu or cuda; auto: CUDA where there is one")
    seed: int = option(0, "of the first repeat; the next ones count on")
    out: Optional[str] = option(None, "folder for amp-bench-MACHINE.csv, .md and .png; docs/results where not given")

    def __post_init__(self):
        rules = {
            "repeats": (self.repeats >= LEAST_REPEATS, f"at least {LEAST_REPEATS}"),
            "only": (set(self.names) <= set(SCENARIOS), f"of {','.join(SCENARIOS)}"),
            "size": (self.size in (None, "small", "cpu", "cuda"), "small, cpu or cuda"),
            "seed": (0 <= self.seed < 2**31, "from 0 to 2147483647"),
        }
        options.within(self, rules)
        options.flag(KILL_SWITCH)  # PPO's turn comes late
        if self.out is None and self.size not in (None, self.where):
            raise ValueError(f"size={self.size} must go with --out: docs/results is for size {self.where} here")

    @property
    def names(self) -> list[str]:
        return list(SCENARIOS) if self.only is None else list(dict.fromkeys(self.only.split(",")))

    @property
    def where(self) -> str:
        return options.device(self.device)[0].type


def main(words: Optional[list[str]] = None) -> int:
    words = sys.argv[1:] if words is None else words
    given, _ = options.parse(Settings, "scripts/bench_amp.py", __doc__.splitlines()[0], words)
    device, size = torch.device(given.where), given.size or given.where
    try:
        out = options.new_folder(given.out or REPO / "docs" / "results")
    except ValueError as error:
        sys.exit(f"scripts/bench_amp.py: {error}")
    begin, used = time.monotonic(), cpu_seconds()
    rows = bench(given.names, size, given.repeats, given.seed, device)
    seconds, (all_of_it, own) = time.monotonic() - begin, cpu_seconds()
    others = max(all_of_it - used[0] - (own - used[1]), 0.0) / seconds
    command = "make bench-amp" + (f" ARGS={shlex.quote(shlex.join(words))}" if words else "")
    facts = Facts(given.where, size, command, seconds, others)
    print(*write(rows, facts, out), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
