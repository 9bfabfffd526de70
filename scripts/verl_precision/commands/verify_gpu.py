"""Test verl in fp16 on a GPU and measure it.

Stages: machine; numerics and faults of verl's engines; jobs with vLLM in three regimes, also with long answers; the
mismatch before training; cost of a step; AMP outside verl. Each runs with the packages that are installed and needs no
network. Writes NAME-OF-GPU.md and .json, and figures, to OUT after every step. The same command resumes: steps that
passed under the same versions are not run again, unless ONLY names them. DEVICE=cpu runs all steps in small.

Exit code 0: every step passed, or was skipped for a missing package or dtype; 1: one failed, all were skipped, or a
refusal; 130: interrupted.
"""

from pathlib import Path

from verl_precision.files import check_room
from verl_precision.format import duration
from verl_precision.paths import OUTPUTS, REPO
from verl_precision.process import interrupt_on_signals
from verl_precision.verify.steps import STAGES, STEPS, Step, VerifiedDevice
from verl_precision.words import device, file_path, parse_words, some_of

VERIFIED = OUTPUTS / "verify-gpu"
VARIABLES = {
    "ONLY": f"stages, or steps such as sanity-fp16; default all that have not passed: {', '.join(STAGES)}",
    "OUT": "the folder of the report, default docs/results/gpu; with DEVICE=cpu outputs/verify-gpu",
    "WORK": "the folder of the runs and logs, default outputs/verify-gpu/work",
    "DEVICE": "cpu or cuda, default: cuda where there is a GPU",
}


def parse(words: list[str]) -> tuple[list[Step], Path, VerifiedDevice]:
    """Return the steps that ONLY names, none if it is not set, the folder of the report, and what is verified.

    Raises:
        Refused: a name or a value is not allowed.
    """
    values = parse_words(words, VARIABLES)
    named = some_of(values, "ONLY", list(dict.fromkeys([*STAGES, *(step.name for step in STEPS)])), default="")
    target = VerifiedDevice(device(values), Path(file_path(values, "WORK") or VERIFIED / "work"))
    out = Path(file_path(values, "OUT") or (VERIFIED if target.small else REPO / "docs/results/gpu"))
    check_room(out)
    return [step for step in STEPS if {step.name, step.stage} & set(named)], out, target


def main(request: tuple[list[Step], Path, VerifiedDevice]) -> int:
    from verl_precision.verify.report import Verification, counts, device_name, write

    interrupt_on_signals()
    named, out, target = request
    record = Verification.open(out, device_name(target.device))
    steps = named or [step for step in STEPS if not record.passed(step)]
    for number, step in enumerate(steps, start=1):
        print(f"{number}/{len(steps)} {step.stage}, {step.name} …", end=" ", flush=True)
        result = step.run(target)
        took = f" in {duration(result['seconds'])}" if "seconds" in result else ""
        print(f"{result['status']}{took}{': ' + result['reason'] if 'reason' in result else ''}", flush=True)
        record.add(step, result)
        write(record)
    print(f"\n{record.content['name']}: {counts(record.content)}\n\n  {write(record)}")
    statuses = [each["status"] for each in record.content["steps"].values()]
    return int("failed" in statuses or "passed" not in statuses)
