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
from recipes.amp.options import check_values, environment_flag, new_folder, option, parse_config, resolve_device
from recipes.amp.ppo.algorithm import KILL_SWITCH
from verl_precision.bench.amp_measure import ArmResult, measure, ratio
from verl_precision.bench.amp_report import Conditions, markdown, plot_ratios
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
    for name, repeat in ((name, repeat) for name in names for repeat in range(repeats)):
        results = measure(name, size, repeat, seed + repeat, device, on_cpu)
        times = [f"{BASE} {significant(results[0].seconds * 1e3)} ms"]
        for row in results[1:]:
            gain = ratio(results, name, row.arm, "seconds")
            shown = f"n/a: {gain.reason}" if gain.reason else f"{significant(gain.median)}×"
            times.append(f"{row.arm} {significant(row.seconds * 1e3)} ms ({shown})")
        print(f"{name} {repeat + 1}/{repeats}: {', '.join(times)}", flush=True)
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
    """Options of the command line."""

    repeats: int = option(LEAST_REPEATS, f"repeats of every scenario, each with its own seed; at least {LEAST_REPEATS}")
    only: str = option(",".join(SCENARIOS), "scenarios, separated by commas")
    size: Optional[str] = option(None, "cpu, cuda, or small for tests; default: the size for the device")
    device: str = option("auto", "auto, cpu or cuda; auto: CUDA if available")
    seed: int = option(0, "seed of the first repeat; each further repeat adds 1", "from 0 to 2147483647")
    out: Optional[str] = option(None, "folder for amp-bench-MACHINE.csv, .md and .png; default docs/results")

    def __post_init__(self):
        rules = {
            "repeats": (lambda number: number >= LEAST_REPEATS, f"at least {LEAST_REPEATS}"),
            "only": (lambda names: set(names.split(",")) <= set(SCENARIOS), f"of {','.join(SCENARIOS)}"),
            "size": (lambda size: size in (None, "small", "cpu", "cuda"), "small, cpu or cuda"),
        }
        check_values(self, rules)
        environment_flag(KILL_SWITCH)  # PPO reads it, after the other scenarios
        usual = resolve_device(self.device)[0].type
        if self.out is None and self.size not in (None, usual):
            raise ValueError(f"size={self.size} requires --out: docs/results is for size={usual} on this machine")


def main(words: Optional[list[str]] = None) -> int:
    """Run the command line ``words`` (``sys.argv`` by default)."""
    words = sys.argv[1:] if words is None else words
    chosen, _ = parse_config(AmpBenchOptions, "verl-precision bench-amp", __doc__.splitlines()[0], words)
    target, _ = resolve_device(chosen.device)
    size = chosen.size or target.type
    try:
        out = new_folder(chosen.out or REPO / "docs" / "results")
    except ValueError as error:
        sys.exit(f"verl-precision bench-amp: {error}")
    begin, used = time.monotonic(), cpu_seconds()
    rows = bench(dict.fromkeys(chosen.only.split(",")), size, chosen.repeats, chosen.seed, target)
    seconds, (used_by_all, own) = time.monotonic() - begin, cpu_seconds()
    others = max(used_by_all - used[0] - (own - used[1]), 0.0) / seconds
    command = "make bench-amp" + (f" ARGS={shlex.quote(shlex.join(words))}" if words else "")
    print(*write(rows, Conditions(target.type, size, command, seconds, others, no_tf32(target)), out), sep="\n")
    return 0
