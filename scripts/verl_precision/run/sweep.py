"""Run the same job under several regimes, seeds and objectives.

Each run is ``verl-precision run`` in a separate process, one after another, in ``OUT/OBJECTIVE/LABEL-seedN``. Seeds
are outermost, so that the finished runs are balanced at any time. Finished runs are not repeated, an interrupted one
resumes from its checkpoint. The label is the regime.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from verl_precision.errors import Refused
from verl_precision.format import duration, number
from verl_precision.paths import OUTPUTS, PROGRAM
from verl_precision.process import ignore_signals, interrupt_on_signals, start_child
from verl_precision.run.job import VARIABLES as RUN_VARIABLES
from verl_precision.run.job import parse_job
from verl_precision.run.validation import platform_variables
from verl_precision.spelling import as_options

LISTS = {"PRECISION": "fp16", "ALGO": "grpo", "SEED": "1"}  # the variables that take several values, and their defaults
VARIABLES = RUN_VARIABLES | {
    "PRECISION": "the regimes, default fp16: {precision}",
    "ALGO": "the objectives, default grpo; each gets a report: {algo}",
    "SEED": "the seeds, default 1",
    "OUT": "the folder of all runs and reports, default outputs/compare/EXPERIMENT",
}


@dataclass(frozen=True)
class SweepRun:
    """One run of the comparison; ``words`` are the variables of ``make run``."""

    objective: str
    label: str
    seed: str
    words: tuple[str, ...]
    out: Path

    def __str__(self) -> str:
        return f"{self.objective} {self.label} seed {self.seed}"

    @property
    def values(self) -> dict[str, str]:
        """The variables by name."""
        return dict(word.partition("=")[::2] for word in self.words)

    def summary(self) -> dict:
        """Return the content of the finished run's ``summary.json``."""
        return json.loads((self.out / "summary.json").read_text())


@dataclass(frozen=True)
class SweepPlan:
    """All runs of a comparison in their order, and those of them that were finished before."""

    experiment: str
    out: Path
    runs: tuple[SweepRun, ...]
    finished: tuple[SweepRun, ...]


@dataclass
class SweepOutcome:
    """The finished runs' labels and folders by objective, the failed runs, and whether the sweep was interrupted."""

    finished: dict[str, list[tuple[str, Path]]]
    failed: list[SweepRun]
    interrupted: bool

    @property
    def code(self) -> int:
        """The exit code."""
        return 130 if self.interrupted else 1 if self.failed else 0


def distinct(name: str, value: str) -> list[str]:
    """Return the values of a variable that takes several; refuse one that occurs twice."""
    values = value.split()
    if repeated := [item for item in values if values.count(item) > 1]:
        raise Refused(f"{name}={value}: contains {repeated[0]} more than once")
    return values


def common_words(values: Mapping[str, str]) -> list[str]:
    """Return the words that all runs share."""
    return [f"{name}={values[name]}" for name in values if name in RUN_VARIABLES and name not in (*LISTS, "OUT")]


def check_words(values: Mapping[str, str]) -> None:
    """Parse the words of every run with only the standard library; refuse a value that is not allowed."""
    lists = [[f"{name}={value}" for value in distinct(name, values.get(name, of))] for name, of in LISTS.items()]
    for words in product(*lists):
        parse_job([*common_words(values), *words, *([f"OUT={values['OUT']}"] if "OUT" in values else [])])


def plan_sweep(values: Mapping[str, str]) -> SweepPlan:
    """Return the runs that these ``VARIABLES`` describe; refuse if one of them can neither start nor resume."""
    lists = {name: distinct(name, values.get(name, default)) for name, default in LISTS.items()}
    experiment = values.get("EXPERIMENT", "gsm8k_1gpu" if "TRAIN" in values else "arithmetic")
    out = Path(values.get("OUT", OUTPUTS / "compare" / experiment)).expanduser().resolve()
    runs = []
    for seed, algo, precision in product(lists["SEED"], lists["ALGO"], lists["PRECISION"]):
        objective = values.get("RECIPE", algo)
        folder = out / objective / f"{precision}-seed{seed}"
        own_words = (f"PRECISION={precision}", f"ALGO={algo}", f"SEED={seed}", f"OUT={folder}")
        runs.append(SweepRun(objective, precision, seed, (*common_words(values), *own_words), folder))
    print(f"checking {len(runs)} runs", flush=True)
    return SweepPlan(experiment, out, tuple(runs), tuple(find_finished(runs)))


def find_finished(runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Let the command ``run`` check the runs, on the platform of their verl, and return those that are finished.

    Raises:
        Refused: one of the others can neither start nor resume.
    """
    platform = platform_variables(parse_job([*runs[0].words]))  # they differ in neither device nor recipe
    done = subprocess.run(
        [*PROGRAM, "run", "--check-each"],
        input=json.dumps([run.values for run in runs]),
        env=os.environ | platform,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Refused(last_line(done.stderr).removeprefix("verl-precision run: "))
    checked = json.loads(last_line(done.stdout))  # verl may print when it is imported
    return [run for run, facts in zip(runs, checked, strict=True) if facts["finished"]]


def last_line(text: str) -> str:
    """Return the last line that is not blank."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it ended without a message")


def time_left(done: Sequence[SweepRun], ahead: Sequence[SweepRun]) -> str:
    """Return how many runs are ahead and how long they take, estimated from finished ones of the same objective."""
    if not ahead:
        return "none left"
    if not done:
        return f"{len(ahead)} left"
    seconds: dict[str, list[float]] = {}
    for run in done:
        seconds.setdefault(run.objective, []).append(run.summary()["wall_s"])
    every = [value for values in seconds.values() for value in values]
    expected = sum(fmean(seconds.get(run.objective, every)) for run in ahead)
    return f"{len(ahead)} left, about {duration(expected)}"


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
    started, total = time.monotonic(), len(plan.runs)
    done, failed, interrupted = [*plan.finished], [], False
    ahead = [run for run in plan.runs if run not in plan.finished]

    def report(text: str) -> None:
        print(f"[{duration(time.monotonic() - started):>6}] {text}", flush=True)

    report(f"{len(done)} of {total} runs are finished, {time_left(done, ahead)}; all in {plan.out}")
    try:
        while ahead:
            current = ahead[0]
            report(f"run {total - len(ahead) + 1}/{total}: {current}")
            code = run_one(current)
            ahead = ahead[1:]
            if code:
                failed.append(current)
                report(f"{current} failed with exit code {code}, {time_left(done, ahead)}")
                continue
            done.append(current)
            summary = current.summary()
            rewards = " to ".join(number(summary[name], ".3f") for name in ("reward_first", "reward_last"))
            report(f"{current}: reward {rewards} in {duration(summary['wall_s'])}; {time_left(done, ahead)}")
    except KeyboardInterrupt:
        interrupted = True
        report(f"interrupted, {len(done)} of {total} runs are finished")
    finished: dict[str, list[tuple[str, Path]]] = {}
    for each in plan.runs:
        if each in done:
            finished.setdefault(each.objective, []).append((each.label, each.out))
    return SweepOutcome(finished, failed, interrupted)
