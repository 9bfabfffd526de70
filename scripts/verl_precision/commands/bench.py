"""Measure the cost of a precision: optimizer step, whole training step.

    optimizer  the optimizer step of verl's FSDP engine
    training   the training step of verl's worker

The regimes alternate in one process, so that a slow machine slows all of them. A ratio is the median over the rounds of
a regime's time over bf16's in the same round. Kernel launches and synchronizations are counted by torch's profiler.
What does not fit into the memory is left out, with the reason. Writes cost-MACHINE.csv and .md, where MACHINE is cpu or
the GPU's name.
"""

import argparse
import os
import sys
from pathlib import Path

from verl_precision.facts.packages import check_packages
from verl_precision.paths import REPO
from verl_precision.words import Parser

PARTS = ("optimizer", "training")
# By --size: parts; million parameters and numbers of processes of the optimizer step; seconds per configuration; layers
# and width of the model of the training step, tokens of a row.
PRESETS = {
    "small": {"parts": PARTS, "sizes": [1], "ranks": [1], "seconds": 0.1, "training": (1, 32, 16)},
    "cpu": {
        "parts": ["optimizer"],
        "sizes": [10, 30, 100, 300],
        "ranks": [1, 2],
        "seconds": 25.0,
        "training": (2, 256, 64),
    },
    "cuda": {
        "parts": PARTS,
        "sizes": [10, 30, 100, 300, 1000],
        "ranks": [1],
        "seconds": 4.0,
        "training": (24, 1024, 512),
    },
}


def above_zero(text: str) -> list[int]:
    """Parse whole numbers above 0, separated by commas."""
    values = [int(word) for word in text.split(",")]
    if min(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: must be whole numbers above 0, separated by commas")
    return values


def parse(words: list[str]) -> argparse.Namespace:
    parser = Parser("verl-precision bench", __doc__)
    parser.add_argument("--size", choices=PRESETS, help="default: the device's; small: for tests, with --out")
    parser.add_argument("--only", choices=PARTS, help="default: both; on a CPU optimizer")
    parser.add_argument("--sizes", type=above_zero, help="model sizes for the optimizer step, in millions")
    parser.add_argument("--ranks", type=above_zero, help="numbers of processes for it; always 1 on a GPU")
    parser.add_argument("--seconds", type=float, help="time per configuration; at least 41 rounds, or 11 of training")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where torch finds a GPU")
    parser.add_argument("--out", type=Path, help="folder for the results; default docs/results")
    options = parser.parse_args(words)
    if options.size == "small" and options.out is None:
        parser.error("--size small requires --out: docs/results is for the sizes of a device")
    return options


def chosen_size(options: argparse.Namespace, device: str) -> argparse.Namespace:
    """Return the preset of ``device``, with what the command line sets instead."""
    given = {name: getattr(options, name) for name in ("sizes", "ranks", "seconds") if getattr(options, name)}
    given |= {"ranks": [1]} if device == "cuda" else {}
    given |= {"parts": [options.only]} if options.only else {}
    return argparse.Namespace(**PRESETS[options.size or device] | given)


def main(words: list[str]) -> int:
    options = parse(words)
    check_packages(("torch",))

    import torch

    from verl_precision.bench.cost_report import write
    from verl_precision.bench.measurement import machine, machine_slug
    from verl_precision.bench.optimizer_step import measure_steps
    from verl_precision.bench.regimes import spawn
    from verl_precision.bench.training_step import measure_training
    from verl_precision.run.job import CPU_PLATFORM

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = chosen_size(options, device)
    sys.path.append(str(REPO))
    if device == "cpu":
        os.environ |= CPU_PLATFORM
    rows = []
    if "optimizer" in size.parts:
        for ranks in size.ranks:
            rows += spawn(measure_steps, ranks, device, ranks, size.sizes, size.seconds)
    if "training" in size.parts:
        rows += spawn(measure_training, 1, device, *size.training, size.seconds)
    out = options.out or REPO / "docs" / "results"
    print(*write(rows, machine(device), out / f"cost-{machine_slug(device)}"), sep="\n")
    return 0
