"""The folder of one run, and whether a run can be started or resumed there.

``run.json`` what was asked and what it took so far, ``metrics.jsonl`` verl's metrics a step a line, ``train.log`` all
output, ``checkpoints/``, and of a finished run ``summary.json`` and ``curves.png``.
"""

import fcntl
import importlib.util
import json
import shlex
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TextIO

from lib.errors import Refused
from lib.files import read_jsonl
from lib.run.job import Job


@cache
def load_manifest(verl: Path) -> ModuleType:
    """How the verl in this folder chooses a checkpoint, without the seconds that importing verl takes."""
    spec = importlib.util.spec_from_file_location("manifest", verl / "utils" / "checkpoint" / "manifest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkpoint_step(out: Path) -> int:
    """The step that verl would resume from, 0 without a checkpoint.

    Raises:
        Refused: there are checkpoints and none is whole.
    """
    (verl,) = importlib.util.find_spec("verl").submodule_search_locations
    manifest = load_manifest(Path(verl))
    try:
        chosen = manifest.choose(out / "checkpoints").folder
    except manifest.CheckpointError as error:
        raise Refused(f"OUT={out}: {error}") from error
    return int(chosen.name.removeprefix("global_step_")) if chosen else 0


def finished(out: Path) -> bool:
    return (out / "summary.json").exists()


def folder(job: Job, outputs: Path) -> Path:
    """OUT, or the first default folder, ``…``, ``…-2``, ``…-3``, that holds no finished run."""
    names = (job.name if number == 1 else f"{job.name}-{number}" for number in count(1))
    return job.out or next(out for name in names if not finished(out := outputs / job.experiment / name))


def admit(job: Job, out: Path, steps: int) -> dict:
    """The content of ``run.json`` with which ``out`` is started, or taken up where it stands.

    Raises:
        Refused: ``out`` holds something else, a run with other settings, or one that has come as far as ``steps``.
    """
    file = out / "run.json"
    fresh = {"settings": job.settings(), "steps": steps, "wall_s": 0.0, "peak_memory_gib": 0.0}
    if not file.exists():
        if out.exists() and any(out.iterdir()):
            raise Refused(f"OUT={out}: is not empty and holds no run; choose another folder")
        return fresh
    record = json.loads(file.read_text())
    if not read_jsonl(out / "metrics.jsonl"):  # it ended before its first step: nothing to resume, nothing to lose
        return fresh
    for name, value in job.settings().items():
        held = record["settings"].get(name, "")  # a run of before a variable was there has the variable not given
        if value != held:
            if name == "ARGS":
                value, held = only_here(value, held), only_here(held, value)
            raise Refused(
                f"{name}={value}: {out} holds a run with {name}={held}; "
                "repeat its settings, choose another OUT or remove that folder"
            )
    if finished(out) and steps <= record["steps"]:
        raise Refused(f"STEPS={steps}: {out} holds a finished run of {record['steps']}; ask for more, or another OUT")
    if steps < checkpoint_step(out):
        raise Refused(f"STEPS={steps}: {out} is already at step {checkpoint_step(out)}; ask for more, or another OUT")
    return record | {"steps": steps}


def only_here(args: str, others: str) -> str:
    """Return the words of one ARGS that another lacks; all of them where only the order differs."""
    words, lacking = shlex.split(args), shlex.split(others)
    return shlex.join([word for word in words if word not in lacking] if set(words) != set(lacking) else words)


def lock(out: Path) -> TextIO:
    """``train.log``, open for appending, and locked for as long as this process or a child that inherits it lives.

    Raises:
        Refused: another run holds it.
    """
    log = (out / "train.log").open("a")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Refused(f"OUT={out}: another run is writing there; wait for it or choose another folder") from error
    return log
