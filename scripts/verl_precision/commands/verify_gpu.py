"""Test verl in fp16 on a GPU and measure it, in about half an hour.

Stages: machine; numerics and faults of verl's engines; jobs with vLLM in three regimes, also with long answers; the
mismatch before training; cost of a step; AMP outside verl. Each runs with the packages that are installed and needs no
network. Writes NAME-OF-GPU.md and .json, and figures, to OUT after every step. The same command resumes: steps that
passed under the same versions are not run again, unless ONLY names them. DEVICE=cpu runs all steps in small.

Exit code 0: every step passed, or was skipped for a missing package or dtype; 1: one failed, all were skipped, or a
refusal; 130: interrupted.
"""

from dataclasses import dataclass
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.files import check_room
from verl_precision.format import duration
from verl_precision.paths import OUTPUTS, REPO
from verl_precision.process import interrupt_on_signals
from verl_precision.verify.step import Step, VerifiedDevice
from verl_precision.verify.steps import STAGES, STEPS
from verl_precision.words import alternatives, device, file_path, gpu_present, parse_words

VERIFIED = OUTPUTS / "verify-gpu"
VARIABLES = {
    "ONLY": f"stages, or steps such as sanity-fp16; default all that have not passed: {', '.join(STAGES)}",
    "OUT": "the folder of the report, default docs/results/gpu; with DEVICE=cpu outputs/verify-gpu",
    "WORK": "the folder of the runs and logs, default outputs/verify-gpu/work",
    "DEVICE": "cpu or cuda, default: cuda where there is a GPU",
}


@dataclass(frozen=True)
class VerifyOptions:
    """Options of the command line; ``steps`` are those that ONLY names, none if it is not set."""

    steps: tuple[Step, ...]
    out: Path
    target: VerifiedDevice


def parse(words: list[str]) -> VerifyOptions:
    """Parse ``NAME=VALUE`` words.

    Raises:
        Refused: a name or a value is not allowed.
    """
    values = parse_words(words, VARIABLES)
    named = values.get("ONLY", "").split()
    allowed = list(dict.fromkeys([*STAGES, *(step.name for step in STEPS)]))
    for name in named:
        if name not in allowed:
            raise Refused(f"ONLY={name}: {alternatives(name, allowed, 'stages and steps')}")
    chosen = device(values)
    if chosen == "cuda" and not gpu_present():  # which RAY_ADDRESS would excuse
        raise Refused("DEVICE=cuda: nvidia-smi finds no GPU here; use DEVICE=cpu")
    out = Path(file_path(values, "OUT") or (REPO / "docs/results/gpu" if chosen == "cuda" else VERIFIED))
    check_room(out)
    steps = tuple(step for step in STEPS if {step.name, step.stage} & set(named))
    return VerifyOptions(steps, out, VerifiedDevice(chosen, Path(file_path(values, "WORK") or VERIFIED / "work")))


def main(options: VerifyOptions) -> int:
    from verl_precision.verify.record import Verification, device_name
    from verl_precision.verify.report import counts, write

    interrupt_on_signals()
    record = Verification.open(options.out, device_name(options.target.device))
    chosen = options.steps or tuple(step for step in STEPS if not record.passed(step))
    for number, step in enumerate(chosen, start=1):
        print(f"{number}/{len(chosen)} {step.stage}, {step.name} …", end=" ", flush=True)
        result = step.run(options.target)
        took = f" in {duration(result['seconds'])}" if "seconds" in result else ""
        print(f"{result['status']}{took}{': ' + result['reason'] if 'reason' in result else ''}", flush=True)
        record.add(step, result)
        write(record)
    print(f"\n{record.content['name']}: {counts(record.content)}\n\n  {write(record)}")
    statuses = [each["status"] for each in record.content["steps"].values()]
    return int("failed" in statuses or "passed" not in statuses)
