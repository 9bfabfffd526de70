"""Compare training in fp16 and bf16 outside verl with fp32: time, memory and learning outcome.

    bench-amp                                       all scenarios, into docs/results; 3 minutes on 2 cores
    bench-amp --only mlp,ppo --repeats 7 --out DIR

The arms of a scenario are fp32, fp16, bf16 and, on a GPU that has it, fp32 with TF32. They train side by side from the
same weights, on the same data, clipped alike, and take turns at every update, each round in a different order. Each
repeat has its own seed. ``FP16Trainer`` observes the dtype that an arm computes in; if it is not the requested one, no
speed-up is reported. The first two updates are not timed. Writes amp-bench-MACHINE.csv and .md.
"""

import argparse
import csv
import os
import shlex
import sys
import time
from dataclasses import asdict

from verl_precision.errors import Refused
from verl_precision.facts.packages import check_packages
from verl_precision.paths import REPO
from verl_precision.words import Parser, folder

NAMES = ("mlp", "world_model", "evolution", "ppo")
LEAST_REPEATS = 5


def at_least_five(text: str) -> int:
    """Parse a number of repeats."""
    if int(text) < LEAST_REPEATS:
        raise argparse.ArgumentTypeError(f"{text}: must be at least {LEAST_REPEATS}")
    return int(text)


def of_names(text: str) -> list[str]:
    """Parse names of scenarios, separated by commas."""
    if not set(text.split(",")) <= set(NAMES):
        raise argparse.ArgumentTypeError(f"{text}: must be of {','.join(NAMES)}, separated by commas")
    return list(dict.fromkeys(text.split(",")))


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("verl-precision bench-amp", __doc__)
    parser.add_argument("--repeats", type=at_least_five, default=LEAST_REPEATS, help="of every scenario; at least 5")
    parser.add_argument("--only", type=of_names, default=NAMES, help=f"scenarios, of {','.join(NAMES)}")
    parser.add_argument("--size", choices=["small", "cpu", "cuda"], help="default: the device's; small: for tests")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where torch finds a GPU")
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat; each further repeat adds 1")
    parser.add_argument("--out", type=folder, help="folder for the results; default docs/results")
    options = parser.parse_args(words)
    if options.size and not options.out:
        parser.error("--size requires --out: docs/results is for the size of this machine's device")
    if os.environ.get("DISABLE_AMP"):
        raise Refused("DISABLE_AMP is set in the environment, and PPO would not train in 16 bits: unset it")
    return options


def main(words: list[str]) -> int:
    options = parse(words)
    check_packages(("torch", "gymnasium"))
    sys.path.append(str(REPO))  # for the recipes

    from recipes.amp.options import resolve_device
    from verl_precision.bench.amp_measure import measure
    from verl_precision.bench.amp_report import markdown, speed_up
    from verl_precision.bench.measurement import allocate_workspaces, machine_slug

    out = options.out or REPO / "docs" / "results"
    try:
        device, _ = resolve_device(options.device or "auto")
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        raise Refused(str(error)) from None
    if device.type == "cuda":
        allocate_workspaces()
    begin, size, rows = time.monotonic(), options.size or device.type, []
    for name in options.only:
        for repeat in range(options.repeats):
            results = measure(name, size, options.seed + repeat, device)
            shown = (f"{row.arm} {row.seconds * 1e3:.3g} ms ({speed_up(results, name, row.arm)})" for row in results)
            print(f"{name} {repeat + 1}/{options.repeats}: {', '.join(shown)}", flush=True)
            rows += results
    command = "make bench-amp" + (f" ARGS={shlex.quote(shlex.join(words))}" if words else "")
    files = [out / f"amp-bench-{machine_slug(device.type)}.{suffix}" for suffix in ("csv", "md")]
    with files[0].open("w", newline="") as file:
        table = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
        table.writeheader()
        table.writerows(map(asdict, rows))
    files[1].write_text(markdown(rows, device.type, size, command, time.monotonic() - begin))
    print(*files, sep="\n")
    return 0
