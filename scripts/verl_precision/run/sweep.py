"""Run the same job under several regimes, seeds and objectives.

Each run is ``verl-precision run`` in a separate process, one after another, in ``OUT/OBJECTIVE/REGIME-seedN``. Seeds
are outermost, so that the finished runs are balanced at any time. Finished runs are not repeated, an interrupted one
resumes from its checkpoint.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from verl_precision.errors import Refused
from verl_precision.format import duration, number
from verl_precision.paths import OUTPUTS, PROGRAM
from verl_precision.process import ignore_signals, interrupt_on_signals, start_child
from verl_precision.run.job import VARIABLES as RUN_VARIABLES
from verl_precision.run.job import parse_job
from verl_precision.run.validation import platform_variables
from verl_precision.spelling import as_options

# The variables that take several values, and their defaults. The first varies slowest.
LISTS = {"SEED": "1", "ALGO": "grpo", "PRECISION": "fp16"}
VARIABLES = RUN_VARIABLES | {
    "PRECISION": "the regimes, default fp16: {precision}",
    "ALGO": "the objectives, default grpo; each gets a report: {algo}",
    "SEED": "the seeds, default 1",
    "OUT": "the folder of all runs and reports, default outputs/compare/EXPERIMENT",
}


class SweepRun(NamedTuple):
    """One run of the comparison; ``values`` are the variables of ``make run``."""

    objective: str
    precision: str
    seed: str
    values: dict[str, str]
    out: Path

    def __str__(self) -> str:
        return f"{self.objective} {self.precision} seed {self.seed}"

    def summary(self) -> dict:
        """Return the content of the finished run's ``summary.json``."""
        return json.loads((self.out / "summary.json").read_text())


class SweepPlan(NamedTuple):
    """All runs of a comparison in their order, and those of them that were finished before."""

    experiment: str
    out: Path
    runs: list[SweepRun]
    finished: list[SweepRun]


class SweepOutcome(NamedTuple):
    """The finished runs' regimes and folders by objective, the failed runs, and the exit code."""

    finished: dict[str, list[tuple[str, Path]]]
    failed: list[SweepRun]
    code: int


def combinations(values: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the variables of every run but its OUT, seeds outermost; refuse a value that is given twice."""
    lists = {name: values.get(name, default).split() for name, default in LISTS.items()}
    for name, each in lists.items():
        if repeated := [item for item in each if each.count(item) > 1]:
            raise Refused(f"{name}={values[name]}: contains {repeated[0]} more than once")
    common = {name: value for name, value in values.items() if name in RUN_VARIABLES and name != "OUT"}
    for chosen in product(*lists.values()):
        yield common | dict(zip(lists, chosen, strict=True))


def check_words(values: Mapping[str, str]) -> None:
    """Parse the words of every run with only the standard library; refuse a value that is not allowed."""
    out = {"OUT": values["OUT"]} if "OUT" in values else {}
    for each in combinations(values):
        parse_job([f"{name}={value}" for name, value in (each | out).items()])


def plan_sweep(values: Mapping[str, str]) -> SweepPlan:
    """Return the runs that these ``VARIABLES`` describe; refuse if one of them can neither start nor resume."""
    experiment = values.get("EXPERIMENT", "gsm8k_1gpu" if "TRAIN" in values else "arithmetic")
    out = Path(values.get("OUT", OUTPUTS / "compare" / experiment)).expanduser().resolve()
    runs = []
    for each in combinations(values):
        objective = each.get("RECIPE", each["ALGO"])
        folder = out / objective / f"{each['PRECISION']}-seed{each['SEED']}"
        runs.append(SweepRun(objective, each["PRECISION"], each["SEED"], each | {"OUT": str(folder)}, folder))
    print(f"checking {len(runs)} runs", flush=True)
    return SweepPlan(experiment, out, runs, find_finished(runs))


def find_finished(runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Let the command ``run`` check the runs, on the platform of their verl, and return those that are finished.

    Raises:
        Refused: one of the others can neither start nor resume.
    """
    job = parse_job([f"{name}={value}" for name, value in runs[0].values.items()])  # all have its device and recipe
    done = subprocess.run(
        [*PROGRAM, "run", "--check-each"],
        input=json.dumps([run.values for run in runs]),
        env=os.environ | platform_variables(job),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        why = done.stderr.strip().splitlines() or ["it ended without a message"]
        raise Refused(why[-1].removeprefix("verl-precision run: "))
    checked = json.loads(done.stdout.splitlines()[-1])  # verl may print when it is imported
    return [run for run, facts in zip(runs, checked, strict=True) if facts["finished"]]


def time_left(done: Sequence[SweepRun], ahead: int) -> str:
    """Return how many runs are ahead and how long they take, by the mean of those that are done."""
    if not ahead:
        return "none left"
    seconds = [run.summary()["wall_s"] for run in done]
    return f"{ahead} left" + (f", about {duration(ahead * fmean(seconds))}" if seconds else "")


def run_one(run: SweepRun) -> int:
    """Run ``verl-precision run`` to its end, show its output and return its exit code.

    Raises:
        KeyboardInterrupt: this process was interrupted; the run has ended in order.
    """
    command = [*PROGRAM, "run", *as_options(run.values)]
    process = start_child(command, Path.cwd(), os.environ, subprocess.PIPE)

    def show_output() -> int:
        for line in filter(None, map(str.rstrip, process.stdout)):
            print(f"  {line}", flush=True)
        return process.wait()

    try:
        return show_output()
    except KeyboardInterrupt:
        ignore_signals()
        process.send_signal(signal.SIGINT)
        show_output()
        raise


def run_sweep(plan: SweepPlan) -> SweepOutcome:
    """Start the planned runs that are not finished, until all are done or the sweep is interrupted."""
    interrupt_on_signals()
    started, total, code = time.monotonic(), len(plan.runs), 0
    done, failed = [*plan.finished], []

    def report(text: str) -> None:
        print(f"[{duration(time.monotonic() - started):>6}] {text}", flush=True)

    ahead = [run for run in plan.runs if run not in done]
    report(f"{len(done)} of {total} runs are finished, {time_left(done, len(ahead))}; all in {plan.out}")
    try:
        for left, run in zip(reversed(range(len(ahead))), ahead, strict=True):
            report(f"run {total - left}/{total}: {run}")
            if code_of_run := run_one(run):
                code = 1
                failed.append(run)
                report(f"{run} failed with exit code {code_of_run}, {time_left(done, left)}")
                continue
            done.append(run)
            summary = run.summary()
            rewards = " to ".join(number(summary[name], ".3f") for name in ("reward_first", "reward_last"))
            report(f"{run}: reward {rewards} in {duration(summary['wall_s'])}; {time_left(done, left)}")
    except KeyboardInterrupt:
        code = 130
        report(f"interrupted, {len(done)} of {total} runs are finished")
    finished: dict[str, list[tuple[str, Path]]] = {}
    for run in plan.runs:
        if run in done:
            finished.setdefault(run.objective, []).append((run.precision, run.out))
    return SweepOutcome(finished, failed, code)
