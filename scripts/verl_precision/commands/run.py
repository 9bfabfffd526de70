"""Train with verl in a regime.

Starts verl's own ``main_ppo`` and shows its progress. Everything goes to the folder OUT, and the same command resumes a
run that was interrupted. With RAY_ADDRESS in the environment it trains on that running Ray cluster, after checking the
code of its nodes. A run that lost a worker or a node waits until the cluster has the resources again and resumes from
the last complete checkpoint, RETRIES times; any other failure ends it. Exit code 0: trained all steps; 1: refused or
failed; 75: gave up after a worker or node was lost, so that the caller may start it again; 130: interrupted.

With --check, exit code 0: the run could start or resume, or is finished; stdout has a JSON list with its ``out``,
``steps`` and ``finished``. 1: it would be refused; stderr has the reason. No cluster is queried.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl_precision.doctor.job_refusal import ask_doctor
from verl_precision.errors import Refused
from verl_precision.facts.metrics import merge_metrics
from verl_precision.files import write_json
from verl_precision.paths import PROGRAM, REPO
from verl_precision.process import interrupt_on_signals
from verl_precision.run import cluster
from verl_precision.run.checks import check_data, check_start
from verl_precision.run.folder import checkpoint_step, choose_folder, finished_as, lock
from verl_precision.run.job import VARIABLES as VARIABLES  # its options
from verl_precision.run.job import Job, compose
from verl_precision.run.job import parse_job as parse
from verl_precision.run.log import reports
from verl_precision.run.machine import fit_to_gpus
from verl_precision.run.summary import summarize, summary_table
from verl_precision.run.validation import validate
from verl_precision.spelling import as_options

if TYPE_CHECKING:
    from omegaconf import DictConfig


def check_run(job: Job, config: "DictConfig", out: Path) -> dict:
    """Return the content of ``run.json`` with which the run starts or resumes; refuse one that can do neither.

    Checks the job, this machine and the folder, what the doctor knows, and last verl's own validation, the slowest.
    """
    record = check_start(job, config, out)
    ask_doctor(job, out)
    validate(job, config)
    return record


def check_runs(jobs: Sequence[Job]) -> list[dict]:
    """Return ``out``, ``steps`` and ``finished`` of each run; refuse if an unfinished one can neither start nor resume.

    Nothing is written.
    """
    runs = []
    for job in jobs:
        out = choose_folder(job)
        config = compose(job, out)
        steps = config.trainer.total_training_steps
        finished = finished_as(job, out, steps)
        runs.append({"out": str(out), "steps": steps, "finished": finished})
        if not finished:
            check_run(job, config, out)
    return runs


def read_requests() -> list[Job]:
    """Return the runs that stdin describes, each by its variables."""
    try:
        requests = [[f"{name}={value}" for name, value in each.items()] for each in json.load(sys.stdin)]
    except (ValueError, TypeError, AttributeError) as error:
        raise Refused("--check-each: stdin must be a JSON list of objects, one for each run") from error
    return [parse(words) for words in requests]


def run(job: Job) -> int:
    """Train, and write the summary of the finished run. Return the exit code."""
    interrupt_on_signals()
    job, fitted = fit_to_gpus(job)
    if fitted:
        print(fitted)
    out = choose_folder(job)
    config = compose(job, out)
    record = check_run(job, config, out)
    if job.cluster:
        record |= cluster.admit(job, config, out)
    if job.generated:
        if subprocess.run(job.generate_command(), cwd=REPO).returncode:
            return 1  # it has printed why
        check_data(job, config)  # which did not exist before
    from verl_precision.run.train import train  # imports psutil, which --help does without

    out.mkdir(parents=True, exist_ok=True)
    with lock(out) as log:
        begun = log.tell()
        if not checkpoint_step(out):
            record |= {"wall_s": 0.0, "peak_memory_gib": None if job.cluster else 0.0}
        print(job.shell_line(out), end="\n\n")
        if code := train(job, config, out, record, log):
            return code
        with open(log.name) as written:
            written.seek(begun)
            summary = summarize(job, record, merge_metrics(out), reports(written))
    write_json(out / "summary.json", summary)
    print(f"\n{summary_table(summary)}\n")
    for name in ("summary.json", "metrics.jsonl", "train.log"):
        print(f"  {out / name}")
    labeled = f"{job.precision}={shlex.quote(str(out))}"
    print(f"\ncurves:  {shlex.join([*PROGRAM, 'compare', *as_options({'RUNS': labeled})])}")
    return 0


def main(job: Job, check: bool = False, check_each: bool = False) -> int:
    if not (check or check_each):
        return run(job)
    jobs = read_requests() if check_each else [job]
    print(json.dumps(check_runs([fit_to_gpus(each)[0] for each in jobs])))
    return 0
