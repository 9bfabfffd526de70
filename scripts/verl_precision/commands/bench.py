"""Measure the cost of a precision: optimizer step, decoder layers, whole training step.

    optimizer  the optimizer step of verl's FSDP engine
    layers     forward and backward of decoder layers of Qwen2.5's shapes, in 16 bits and in fp32
    training   the training step of verl's worker

The regimes alternate in one process, so that a slow machine slows all of them. A ratio is the median over the rounds of
a regime's time over bf16's in the same round. Kernel launches and synchronizations are counted by torch's profiler.
What does not fit into the memory is left out, with the reason. Writes cost-MACHINE.csv and .md, where MACHINE is cpu or
the GPU's name.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_precision.bench.model_shape import MODELS, SANITY
from verl_precision.facts.packages import check_packages
from verl_precision.paths import REPO
from verl_precision.words import Parser

PARTS = ("optimizer", "layers", "training")


@dataclass(frozen=True)
class CostSize:
    """What is measured.

    Args:
        parts: of ``PARTS``.
        sizes: of the models whose optimizer steps are timed, in million parameters.
        ranks: numbers of processes, for the optimizer step.
        seconds: time per configuration; an optimizer step is timed in at least 41 rounds, a pass in 11.
        layers: the ``config.json`` of each model by name, the number of its layers, rows and tokens of a row.
        training: layers and width of a model, tokens of a row.
    """

    parts: Sequence[str]
    sizes: list[int]
    ranks: list[int]
    seconds: float
    layers: tuple[Mapping[str, Mapping[str, Any]], int, int, int]
    training: tuple[int, int, int]


LAYERS_OF = (
    "Qwen/Qwen2.5-0.5B-Instruct",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",  # Qwen2.5-1.5B's layers
    "Qwen/Qwen2.5-3B",
    "Qwen/Qwen2.5-7B",
)
QWEN = {name.partition("/")[2]: MODELS[name] for name in LAYERS_OF}
PRESETS = {
    "small": CostSize(PARTS, [1], [1], 0.1, ({"sanity": SANITY}, 1, 2, 16), (1, 32, 16)),
    "cpu": CostSize(["optimizer"], [10, 30, 100, 300], [1, 2], 25.0, (QWEN, 1, 1, 128), (2, 256, 64)),
    "cuda": CostSize(PARTS, [10, 30, 100, 300, 1000], [1], 4.0, (QWEN, 2, 4, 2048), (24, 1024, 512)),
}


def above_zero(text: str) -> list[int]:
    """Parse whole numbers above 0, separated by commas."""
    values = [int(word) for word in text.split(",")]
    if min(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: must be whole numbers above 0, separated by commas")
    return values


def of_parts(text: str) -> list[str]:
    """Parse names of parts, separated by commas."""
    names = text.split(",")
    if not set(names) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text}: must be of {','.join(PARTS)}, separated by commas")
    return names


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("verl-precision bench", __doc__)
    parser.add_argument("--size", choices=PRESETS, help="default: the device's; small: for tests, with --out")
    parser.add_argument("--only", type=of_parts, help=f"parts, of {','.join(PARTS)}; default on a CPU: optimizer")
    parser.add_argument("--sizes", type=above_zero, help="model sizes for the optimizer step, in millions")
    parser.add_argument("--ranks", type=above_zero, help="numbers of processes for it; always 1 on a GPU")
    parser.add_argument("--seconds", type=float, help="time per configuration; at least 41 rounds, or 11 of a pass")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where torch finds a GPU")
    parser.add_argument("--out", type=Path, help="folder for the results; default docs/results")
    options = parser.parse_args(words)
    if options.size == "small" and options.out is None:
        parser.error("--size small requires --out: docs/results is for the sizes of a device")
    return options


def chosen_size(options: argparse.Namespace, device: str) -> CostSize:
    """Return the sizes for ``device``, with those that the command line names."""
    given = {"sizes": options.sizes, "ranks": options.ranks, "seconds": options.seconds, "parts": options.only}
    given |= {"ranks": [1]} if device == "cuda" else {}
    return replace(PRESETS[options.size or device], **{key: value for key, value in given.items() if value is not None})


def main(words: list[str]) -> int:
    options = parse(words)
    check_packages(("torch",))

    import torch

    from verl_precision.bench.cost_report import write
    from verl_precision.bench.interleave import machine, machine_slug
    from verl_precision.bench.layer_pass import measure_layers
    from verl_precision.bench.optimizer_step import measure_steps
    from verl_precision.bench.ranks import spawn
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
    if "layers" in size.parts:
        rows += spawn(measure_layers, 1, device, *size.layers, size.seconds)
    if "training" in size.parts:
        rows += spawn(measure_training, 1, device, *size.training, size.seconds)
    out = options.out or REPO / "docs" / "results"
    print(*write(rows, machine(device), out / f"cost-{machine_slug(device)}"), sep="\n")
    return 0
