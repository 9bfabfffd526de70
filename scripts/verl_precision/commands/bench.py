"""Measure the cost of a precision: optimizer step and whole training step.

    optimizer  the optimizer step of verl's FSDP engine
    training   the training step of verl's worker

The regimes alternate in one process, so that a slow machine slows all of them. A ratio is the median over the rounds of
a regime's time over bf16's in the same round. What does not fit into the memory is left out, with the reason. Writes
cost-MACHINE.md, where MACHINE is cpu or the GPU's name.
"""

import argparse
import os
import sys
from typing import NamedTuple

from verl_precision.bench.model_shape import ModelShape, entries
from verl_precision.facts.packages import check_packages
from verl_precision.paths import REPO
from verl_precision.words import Parser, folder

PARTS = ("optimizer", "training")


class CostSize(NamedTuple):
    """What is measured."""

    parts: tuple[str, ...]
    sizes: list[int]  # of the models whose optimizer steps are timed, in million parameters
    seconds: float  # per configuration; an optimizer step is timed in at least 41 rounds, a training step in 11
    layers: int  # of the model of the training step
    width: int  # of its hidden states; the MLP is four times as wide
    length: int  # tokens of a row


PRESETS = {
    "small": CostSize(PARTS, [1], 0.1, 1, 32, 16),
    "cpu": CostSize(("optimizer",), [10, 30, 100, 300], 25.0, 2, 256, 64),
    "cuda": CostSize(PARTS, [10, 30, 100, 300, 1000], 4.0, 24, 1024, 512),
}


def above_zero(text: str) -> list[int]:
    """Parse whole numbers above 0, separated by commas."""
    values = [int(word) for word in text.split(",")]
    if min(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: must be whole numbers above 0, separated by commas")
    return values


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("verl-precision bench", __doc__)
    parser.add_argument("--size", choices=PRESETS, help="default: the device's; small: for tests, with --out")
    parser.add_argument("--only", choices=PARTS, help="the part to measure; default both, on a CPU optimizer")
    parser.add_argument("--sizes", type=above_zero, help="model sizes for the optimizer step, in millions")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where torch finds a GPU")
    parser.add_argument("--out", type=folder, help="folder for the results; default docs/results")
    options = parser.parse_args(words)
    if options.size == "small" and options.out is None:
        parser.error("--size small requires --out: docs/results is for the sizes of a device")
    return options


def main(words: list[str]) -> int:
    options = parse(words)
    check_packages(("torch",))

    import torch
    import torch.distributed as dist

    from verl_precision.bench.cost_report import markdown
    from verl_precision.bench.measurement import lacks_ampere, machine, machine_slug, set_tf32, too_large
    from verl_precision.bench.optimizer_step import BYTES_PER_PARAMETER, measure_optimizer
    from verl_precision.bench.training_step import FP32_HEAD, measure_training
    from verl_precision.run.job import CPU_PLATFORM

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = PRESETS[options.size or device]
    parts, sizes = [options.only] if options.only else size.parts, options.sizes or size.sizes
    out = options.out or REPO / "docs" / "results"
    out.mkdir(parents=True, exist_ok=True)
    sys.path.append(str(REPO))  # for the recipes
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "", "MASTER_PORT": ""}
    os.environ |= CPU_PLATFORM if device == "cpu" else {}
    regimes, rows, left_out = ["bf16", "fp16", "fp32"], [], []
    if device == "cuda":
        set_tf32(False)
        if reason := lacks_ampere("bfloat16"):
            regimes.remove("bf16")
            left_out.append(f"training step, bf16: {reason}")
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for millions in sizes if "optimizer" in parts else []:
        if reason := too_large(millions * 10**6 * BYTES_PER_PARAMETER, device):
            left_out.append(f"optimizer step, {millions} M: {reason}")
        else:
            for fused in (False, True):
                rows += measure_optimizer(millions, fused, size.seconds, device)
    if "training" in parts:
        regimes += [regime + FP32_HEAD for regime in regimes if regime != "fp32"]
        config = entries("qwen2", 32000, size.width, 4 * size.width, size.layers, 16, 16)
        # Weights, gradients and Adam's state in fp32, of a worker for each regime.
        if reason := too_large(len(regimes) * 16 * ModelShape.of(config, "").total, device):
            left_out.append(f"training step: {reason}")
        else:
            rows += measure_training(config, size.length, regimes, size.seconds, device)
    dist.destroy_process_group()
    report = out / f"cost-{machine_slug(device)}.md"
    report.write_text(markdown(rows, left_out, machine(device)))
    print(report)
    return 0
