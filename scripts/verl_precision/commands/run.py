"""Train with verl in a regime.

Starts verl's own ``main_ppo`` and shows its progress. Everything goes to the folder OUT, and the same command resumes a
run that was interrupted. With RAY_ADDRESS in the environment it trains on that running Ray cluster, after checking the
code and dtypes of its nodes. A run that lost a worker or a node waits until the cluster has the resources again and
resumes from the last complete checkpoint, RETRIES times; any other failure ends it. Exit code 0:
trained all steps; 1: refused or failed; 75: gave up after a worker or node was lost, so that the caller may start it
again; 130: interrupted.

With --check, exit code 0: the run could start or resume, or is finished; stdout has a JSON list with its ``out``,
``steps`` and ``finished``. 1: it would be refused; stderr has the reason. No cluster is queried.
"""

import json
import subprocess
import sys

from verl_precision.doctor.job_refusal import ask_doctor
from verl_precision.errors import Refused
from verl_precision.facts.metrics import merge_metrics
from verl_precision.files import write_json
from verl_precision.paths import REPO
from verl_precision.process import interrupt_on_signals
from verl_precision.run import cluster
from verl_precision.run.checks import check_data
from verl_precision.run.curves import plot_curves
from verl_precision.run.folder import checkpoint_step, choose_folder, lock
from verl_precision.run.job import VARIABLES as VARIABLES  # its options
from verl_precision.run.job import compose
from verl_precision.run.job import parse_job as parse
from verl_precision.run.presets import fit_to_gpus
from verl_precision.run.start_checks import check_runs, check_start
from verl_precision.run.summary import summarize, summary_table
from verl_precision.run.validation import validate


def check(requests: list[list[str]]) -> None:
    """Check the runs, each described by its words, and print the outcome as JSON."""
    runs = check_runs([fit_to_gpus(parse(request))[0] for request in requests], ask_doctor)
    print(json.dumps([{"out": str(run.out), "steps": run.steps, "finished": run.finished} for run in runs]))


def read_requests() -> list[dict[str, str]]:
    """Return the runs that stdin describes, each by its variables.

    Raises:
        Refused: it is no JSON list of objects.
    """
    try:
        requests = json.load(sys.stdin)
    except ValueError:
        requests = None
    if not isinstance(requests, list) or not all(isinstance(each, dict) for each in requests):
        raise Refused("--check-each: stdin must be a JSON list of objects, one for each run")
    return requests


def run(words: list[str]) -> int:
    """Train, and write the summary and curves of the finished run. Return the exit code."""
    interrupt_on_signals()
    job, fitted = fit_to_gpus(parse(words))
    if fitted:
        print(fitted)
    out = choose_folder(job)
    config = compose(job, out)
    record = check_start(job, config, out)
    ask_doctor(job, out)
    validate(job, config)
    if job.cluster:
        record |= cluster.admit(job, config, out)
    if job.generated and subprocess.run(job.generate_command(), cwd=REPO).returncode:
        return 1  # it has printed why
    if job.generated:
        check_data(job, config)  # which did not exist before
    from verl_precision.run.train import train  # imports psutil, which --help does without

    out.mkdir(parents=True, exist_ok=True)
    with lock(out) as log:
        if not checkpoint_step(out):
            record |= {"wall_s": 0.0, "peak_memory_gib": None if job.cluster else 0.0}
        print(job.shell_line(out), end="\n\n")
        code, reports = train(job, config, out, record, log)
        data = merge_metrics(out)

    if code:
        return code
    summary = summarize(job, record, data, reports, config.data.max_prompt_length)
    write_json(out / "summary.json", summary)
    title = f"{job.experiment}, {job.objective}, {summary['precision']}"
    plot_curves([(title, data)], title, out / "curves.png")
    print(f"\n{summary_table(summary)}\n")
    for name in ("curves.png", "summary.json", "metrics.jsonl", "train.log"):
        print(f"  {out / name}")
    return 0


def main(words: list[str]) -> int:
    if "--check-each" in words:
        check([[f"{name}={value}" for name, value in each.items()] for each in read_requests()])
        return 0
    if "--check" in words:
        check([[word for word in words if word != "--check"]])
        return 0
    return run(words)
