"""Compare training in fp16 and bf16 outside verl with fp32: time, memory and learning outcome.

    bench-amp                                       all scenarios, into docs/results; 3 minutes on 2 cores
    bench-amp --only mlp,ppo --repeats 7 --out DIR

The arms of a scenario are fp32, fp16, bf16 and, on a GPU that has it, fp32 with TF32. They train side by side from the
same weights, on the same data, clipped alike, and take turns at every update, each round in a different order. Each
repeat has its own seed. ``FP16Trainer`` observes the dtype that an arm computes in; if it is not the requested one, no
speed-up is reported. The first two updates are not timed. Writes CSV, Markdown and PNG.
"""

import csv
import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Optional

import torch

from verl_precision.paths import REPO

sys.path.append(str(REPO))  # for the recipes
from recipes.amp.options import device, flag, new_folder, option, parse, within
from recipes.amp.ppo.config import KILL_SWITCH
from verl_precision.bench.amp_figure import plot_ratios
from verl_precision.bench.amp_measure import ArmResult, measure
from verl_precision.bench.amp_ratio import ratio, seconds_of
from verl_precision.bench.amp_report import Conditions, markdown
from verl_precision.bench.amp_scenarios import BASE, SCENARIOS, no_tf32
from verl_precision.bench.interleave import machine, machine_slug
from verl_precision.bench.resource_usage import allocate_workspaces, cpu_seconds
from verl_precision.format import significant

LEAST_REPEATS = 5


def bench(
    names: Iterable[str], size: str, repeats: int, seed: int, device: torch.device, on_cpu: bool = True
) -> list[ArmResult]:
    """Measure the scenarios one after the other, and print a line a repeat, whose seed is ``seed`` + its number."""
    if device.type == "cuda":
        allocate_workspaces()
    rows: list[ArmResult] = []
    for name in names:
        for repeat in range(repeats):
            begin = time.monotonic()
            results = measure(name, size, repeat, seed + repeat, device, on_cpu)
            times = [f"{BASE} {significant(results[0].seconds * 1e3)} ms"]
            for row in results[1:]:
                gain = ratio(results, name, row.arm, seconds_of)
                gain = f"n/a: {gain.reason}" if gain.reason else f"{significant(gain.median)}×"
                times.append(f"{row.arm} {significant(row.seconds * 1e3)} ms ({gain})")
            took = time.monotonic() - begin
            print(f"{name} {repeat + 1}/{repeats}: {', '.join(times)}; {took:.0f} s", flush=True)
            rows += results
    return rows


def write(rows: list[ArmResult], conditions: Conditions, out: Path) -> list[Path]:
    """Write ``amp-bench-MACHINE.csv``, ``.md`` and ``.png`` into a folder, MACHINE being ``cpu`` or the GPU's name."""
    files = [out / f"amp-bench-{machine_slug(conditions.device)}.{suffix}" for suffix in ("csv", "md", "png")]
    with files[0].open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(ArmResult)], lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(row) for row in rows)
    files[1].write_text(markdown(rows, conditions))
    plot_ratios(rows, machine(conditions.device), files[2])
    return files


@dataclass(frozen=True)
class AmpBenchOptions:
    """Options of the command line.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """

    repeats: int = option(LEAST_REPEATS, f"repeats of every scenario, each with its own seed; at least {LEAST_REPEATS}")
    only: Optional[str] = option(None, f"scenarios, separated by commas; default all: {','.join(SCENARIOS)}")
    size: Optional[str] = option(None, "cpu, cuda, or small for tests; default: the size for the device")
    device: str = option("auto", "auto, cpu or cuda; auto: CUDA if available")
    seed: int = option(0, "seed of the first repeat; each further repeat adds 1")
    out: Optional[str] = option(None, "folder for amp-bench-MACHINE.csv, .md and .png; default docs/results")

    def __post_init__(self):
        rules = {
            "repeats": (self.repeats >= LEAST_REPEATS, f"at least {LEAST_REPEATS}"),
            "only": (set(self.names) <= set(SCENARIOS), f"of {','.join(SCENARIOS)}"),
            "size": (self.size in (None, "small", "cpu", "cuda"), "small, cpu or cuda"),
            "seed": (0 <= self.seed < 2**31, "from 0 to 2147483647"),
        }
        within(self, rules)
        flag(KILL_SWITCH)  # PPO reads it, after the other scenarios
        if self.out is None and self.size not in (None, self.where):
            raise ValueError(f"size={self.size} requires --out: docs/results is for size={self.where} on this machine")

    @property
    def names(self) -> list[str]:
        """Return the names of the chosen scenarios."""
        return list(SCENARIOS) if self.only is None else list(dict.fromkeys(self.only.split(",")))

    @property
    def where(self) -> str:
        """Return the device's type, cpu or cuda."""
        return device(self.device)[0].type


def main(words: Optional[list[str]] = None) -> int:
    """Run the command line ``words`` (``sys.argv`` by default)."""
    words = sys.argv[1:] if words is None else words
    chosen, _ = parse(AmpBenchOptions, "verl-precision bench-amp", __doc__.splitlines()[0], words)
    target, size = torch.device(chosen.where), chosen.size or chosen.where
    try:
        out = new_folder(chosen.out or REPO / "docs" / "results")
    except ValueError as error:
        sys.exit(f"verl-precision bench-amp: {error}")
    begin, used = time.monotonic(), cpu_seconds()
    rows = bench(chosen.names, size, chosen.repeats, chosen.seed, target)
    seconds, (used_by_all, own) = time.monotonic() - begin, cpu_seconds()
    others = max(used_by_all - used[0] - (own - used[1]), 0.0) / seconds
    command = "make bench-amp" + (f" ARGS={shlex.quote(shlex.join(words))}" if words else "")
    conditions = Conditions(chosen.where, size, command, seconds, others, no_tf32(target))
    print(*write(rows, conditions, out), sep="\n")
    return 0
