"""Measure the cost of a precision: the optimizer step of verl's FSDP engine, and on a GPU the whole training step.

The regimes alternate in one process on the same parameters, so that a slow machine slows all of them. A ratio is the
median over the rounds of a regime's time over bf16's in the same round. Writes cost-DEVICE.csv, .md and .png.
"""

import argparse
import os
import sys
from pathlib import Path

from lib.paths import REPO


def above_zero(text: str) -> list[int]:
    """Parse whole numbers above 0, separated by commas."""
    values = [int(word) for word in text.split(",")]
    if min(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: must be whole numbers above 0, separated by commas")
    return values


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=above_zero, default=[10, 30, 100, 300], help="model sizes, in millions")
    parser.add_argument("--ranks", type=above_zero, default=[1, 2], help="numbers of processes; always 1 on a GPU")
    parser.add_argument("--seconds", type=float, default=25.0, help="time per configuration; at least 41 rounds")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "results")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    options = parse(words)

    import torch

    from lib.bench.cost_report import write
    from lib.bench.interleave import machine
    from lib.bench.optimizer_step import count_traffic, measure_steps
    from lib.bench.ranks import spawn
    from lib.bench.training_step import measure_training
    from lib.run.job import CPU_PLATFORM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sys.path.append(str(REPO))
    if device == "cpu":
        os.environ |= CPU_PLATFORM
    rows = []
    for ranks in options.ranks if device == "cpu" else [1]:
        rows += spawn(measure_steps, ranks, ranks, options.sizes, options.seconds, device)
    if device == "cuda":
        rows += spawn(measure_training, 1, options.seconds, device, 24, 1024)
    traffic = dict(spawn(count_traffic, 1))
    print(*write(rows, traffic, device, machine(device), options.out), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
