"""Train and compare regimes, or compare existing runs.

Takes existing runs, ``RUNS="LABEL=FOLDER …"``: folders of ``make run``, finished or not, files of verl's file logger
and TensorBoard events. Or makes them first, ``PRECISION="fp16 bf16" SEED="1 2 3"``, with all that ``make run`` takes.
Writes a report that works offline, with figures, tables and the runs that it was made from.

Exit code 0: done; 1: refused, or a run failed; 130: interrupted, with the report on what was finished.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.paths import PROGRAM
from verl_precision.report.build import write_report
from verl_precision.report.readers import labeled_paths
from verl_precision.report.render import on_screen
from verl_precision.report.statistics import THRESHOLD
from verl_precision.run import sweep
from verl_precision.spelling import as_options
from verl_precision.words import finite_number, parse_words

REPORT_VARIABLES = {
    "RUNS": "LABEL=FOLDER …, the label repeated for each seed: folders of make run, TensorBoard, .jsonl",
    "OUT": "with RUNS the folder of the report, default report; else of runs and reports, default outputs/compare/…",
    "THRESHOLD": "the reward that the mean of five steps must exceed, default 0.95",
    "TITLE": "title of the report, default: Runs compared",
}
VARIABLES = REPORT_VARIABLES | sweep.VARIABLES | REPORT_VARIABLES  # the report's first, with its OUT


def write(values: Mapping[str, str], pairs: Sequence[tuple[str, Path]], out: Path, title: str) -> None:
    """Write the report and print its summary."""
    threshold = finite_number(values, "THRESHOLD", THRESHOLD)
    report = write_report(pairs, out, threshold, values.get("TITLE", title))
    print(f"\n{on_screen(report)}\n\n  {out / 'index.html'}\n")


def of_sweep(values: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if name in sweep.VARIABLES}


def sweep_and_compare(values: Mapping[str, str]) -> int:
    """Start the unfinished runs, and report on the finished ones. Return the exit code."""
    plan = sweep.plan_sweep(of_sweep(values))
    outcome = sweep.run_sweep(plan)
    for objective, pairs in outcome.finished.items():
        write(values, pairs, plan.out / objective / "report", f"{plan.experiment}, {objective}")
    for run in outcome.failed:
        print(f"failed, and not in the report: {run}, {run.out / 'train.log'}")
    if outcome.code:
        print(f"to resume:  {shlex.join([*PROGRAM, 'compare', *as_options(values)])}")
    return outcome.code


def parse(words: list[str]) -> dict[str, str]:
    """Return the values of the words by name, or refuse them; those of a sweep are checked run by run."""
    values = parse_words(words, VARIABLES)
    finite_number(values, "THRESHOLD", THRESHOLD)
    of_runs = [name for name in values if name not in (*REPORT_VARIABLES, "DEVICE")]
    if "RUNS" in values and of_runs:
        raise Refused(f"{of_runs[0]}={values[of_runs[0]]}: cannot be set with RUNS, which takes existing runs")
    if "RUNS" not in values and not of_runs:
        raise Refused(
            "RUNS: is not set; give RUNS='LABEL=FOLDER …', or the runs to make: PRECISION='fp16 bf16' SEED='1 2 3'"
        )
    if of_runs:
        sweep.check_words(of_sweep(values))
    return values


def main(values: dict[str, str]) -> int:
    if "RUNS" not in values:
        return sweep_and_compare(values)
    write(values, labeled_paths(values["RUNS"]), Path(values.get("OUT", "report")).expanduser(), "Runs compared")
    return 0
