"""Check a run before it starts: all that ``verl-precision run`` checks on this machine, for one run or for several.

The slowest check, verl's own validation, comes last. Nothing is written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_precision.run.checks import check_job
from verl_precision.run.folder import choose_folder, finished_as, start_record
from verl_precision.run.job import Job, compose
from verl_precision.run.machine import check_machine
from verl_precision.run.presets import check_gpus
from verl_precision.run.validation import validate

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class CheckedRun:
    """A run that can start or resume in ``out``, or is ``finished`` there with these settings and ``steps``."""

    out: Path
    steps: int
    finished: bool


def check_start(job: Job, config: "DictConfig", out: Path) -> dict:
    """Check the job against this machine and its folder, by all but verl's own validation.

    Returns:
        The content of ``run.json`` with which the run starts or resumes.

    Raises:
        Refused: it can do neither.
    """
    check_job(job, config, out)
    if not job.cluster:
        check_machine(config, job.device)
    if not job.cluster and job.device == "cuda":
        check_gpus(job, config)
    return start_record(job, out, config.trainer.total_training_steps)


def check_runs(jobs: Sequence[Job], ask_doctor: Callable[[Job, Path], None]) -> list[CheckedRun]:
    """Check every job that is not finished in its folder.

    Args:
        ask_doctor: checks a job for a folder by what the doctor knows; this package does not import the doctor.

    Raises:
        Refused: one of them can neither start nor resume.
    """
    outs = [choose_folder(job) for job in jobs]
    configs = [compose(job, out) for job, out in zip(jobs, outs, strict=True)]
    runs = []
    for job, config, out in zip(jobs, configs, outs, strict=True):
        steps = config.trainer.total_training_steps
        runs.append(CheckedRun(out, steps, finished_as(job, out, steps)))
    pending = [(job, config, run) for job, config, run in zip(jobs, configs, runs, strict=True) if not run.finished]
    for job, config, run in pending:
        check_start(job, config, run.out)
        ask_doctor(job, run.out)
    for job, config, _ in pending:
        validate(job, config)
    return runs
