"""Choose and lock the folder of a run, and check that the run may start or resume there.

It contains ``run.json``, the settings, time and memory so far; ``metrics.jsonl``, verl's metrics, a line per step;
``train.log``, all output; ``checkpoints/``; and, for a finished run, ``summary.json``.
"""

import fcntl
import importlib.util
import json
from itertools import count
from pathlib import Path
from typing import TextIO

from verl_precision.errors import Refused
from verl_precision.facts.packages import installed_verl
from verl_precision.files import read_jsonl
from verl_precision.paths import OUTPUTS
from verl_precision.run.job import Job

MANIFEST = "utils/checkpoint/manifest.py"  # below verl/, of the series fixes
TRACKER = "latest_checkpointed_iteration.txt"  # of verl, in the folder of the checkpoints


def checkpoint_step(out: Path) -> int:
    """Return the step that verl would resume from, 0 without a checkpoint.

    The series ``fixes`` chooses the last whole checkpoint; without it, verl's tracker file names one.

    Raises:
        Refused: none of the checkpoints is whole, or the tracker names none of them, so that verl would start over.
    """
    verl, checkpoints = installed_verl(), out / "checkpoints"
    if not (verl / MANIFEST).exists():
        folders = {folder.name for folder in checkpoints.glob("global_step_*")}
        tracker = checkpoints / TRACKER
        step = tracker.read_text().strip() if tracker.exists() else ""
        if folders and f"global_step_{step}" not in folders:
            remedy = "let it name one of them, or apply the patches with FIXES=yes"
            raise Refused(f"OUT={out}: {tracker} names no checkpoint of {', '.join(sorted(folders))}; {remedy}")
        return int(step) if folders else 0
    spec = importlib.util.spec_from_file_location("manifest", verl / MANIFEST)  # without importing all of verl
    manifest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(manifest)
    try:
        chosen = manifest.choose(checkpoints).folder
    except manifest.CheckpointError as error:
        raise Refused(f"OUT={out}: {error}") from error
    return int(chosen.name.removeprefix("global_step_")) if chosen else 0


def finished(out: Path) -> bool:
    return (out / "summary.json").exists()


def finished_as(job: Job, out: Path, steps: int) -> bool:
    """Return whether ``out`` contains a finished run of ``steps`` steps with the job's settings."""
    if not finished(out):
        return False
    record = json.loads((out / "run.json").read_text())
    return record["steps"] == steps and job.settings().items() <= record["settings"].items()


def choose_folder(job: Job, outputs: Path = OUTPUTS) -> Path:
    """Return OUT, or the first default folder, ``…``, ``…-2``, ``…-3``, without a finished run."""
    names = (job.name if number == 1 else f"{job.name}-{number}" for number in count(1))
    return job.out or next(out for name in names if not finished(out := outputs / job.experiment / name))


def start_record(job: Job, out: Path, steps: int) -> dict:
    """Return the content of ``run.json`` with which a run starts or resumes in ``out``.

    Raises:
        Refused: ``out`` contains something else, a run with other settings, or one that has reached ``steps``.
    """
    file = out / "run.json"
    fresh = {"settings": job.settings(), "steps": steps, "wall_s": 0.0, "peak_memory_gib": 0.0}
    if not file.exists():
        if out.exists() and any(out.iterdir()):
            raise Refused(f"OUT={out}: is not empty and contains no run; choose another folder")
        return fresh
    record = json.loads(file.read_text())
    if not read_jsonl(out / "metrics.jsonl"):  # it ended before its first step
        return fresh
    for name, value in job.settings().items():
        recorded = record["settings"].get(name, "")  # an older run may lack a variable: it was unset
        if value != recorded:
            advice = "repeat its settings, choose another OUT or remove that folder"
            raise Refused(f"{name}={value}: {out} contains a run with {name}={recorded}; {advice}")
    if finished(out) and steps <= record["steps"]:
        raise Refused(f"STEPS={steps}: {out} contains a finished run of {record['steps']}; set more, or another OUT")
    if steps < (step := checkpoint_step(out)):
        raise Refused(f"STEPS={steps}: {out} is already at step {step}; set more, or another OUT")
    return record | {"steps": steps}


def lock(out: Path) -> TextIO:
    """Open ``train.log`` for appending, locked while this process or a child that inherits it lives, or refuse."""
    log = (out / "train.log").open("a")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Refused(f"OUT={out}: another run is writing there; wait for it or choose another folder") from error
    return log
