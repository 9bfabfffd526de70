"""Train and compare regimes, or compare existing runs.

Takes existing runs, ``RUNS="LABEL=FOLDER …"``: folders of ``make run``, finished or not, files of verl's file logger,
TensorBoard events and W&B's CSV exports. Or makes them first, ``PRECISION="fp16 bf16" SEED="1 2 3"``, with all that
``make run`` takes. Writes a report that works offline, with figures, tables and the runs that it was made from.

Exit code 0: done; 1: refused, or a run failed; 130: interrupted, with the report on what was finished.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.paths import PROGRAM
from verl_precision.report.build import write_report
from verl_precision.report.readers.dispatch import labeled_paths
from verl_precision.report.statistics import THRESHOLD
from verl_precision.report.tables import on_screen
from verl_precision.run import sweep
from verl_precision.spelling import as_options
from verl_precision.words import finite_number, parse_words

REPORT_VARIABLES = {
    "RUNS": "LABEL=FOLDER …, the label repeated for each seed: folders of make run, TensorBoard, .jsonl, .csv",
    "OUT": "with RUNS the folder of the report, default report; else of runs and reports, default outputs/compare/…",
    "THRESHOLD": "the reward that the mean of five steps must exceed, default 0.95",
    "TITLE": "title of the report, default: Runs compared",
    "NOSPEED": "a reason to claim no speed for any run, e.g. 'the machine was shared', default none",
}
VARIABLES = REPORT_VARIABLES | {name: text for name, text in sweep.VARIABLES.items() if name not in REPORT_VARIABLES}


def write(values: Mapping[str, str], pairs: Sequence[tuple[str, Path]], out: Path, title: str) -> None:
    """Write the report and print its summary."""
    threshold = finite_number(values, "THRESHOLD", THRESHOLD)
    report = write_report(pairs, out, threshold, values.get("TITLE", title), values.get("NOSPEED", ""))
    print(f"\n{on_screen(report)}\n\n  {out / 'index.html'}\n")


def sweep_and_compare(values: Mapping[str, str]) -> int:
    """Start the unfinished runs, and report on the finished ones. Return the exit code."""
    plan = sweep.plan_sweep({name: value for name, value in values.items() if name in sweep.VARIABLES})
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
    if "RUNS" in values:
        if others := [name for name in values if name not in (*REPORT_VARIABLES, "DEVICE")]:
            raise Refused(f"{others[0]}={values[others[0]]}: cannot be set with RUNS, which takes existing runs")
    elif not values.keys() - {*REPORT_VARIABLES, "DEVICE"}:
        raise Refused(
            "RUNS: is not set; give RUNS='LABEL=FOLDER …', or the runs to make: PRECISION='fp16 bf16' SEED='1 2 3'"
        )
    else:
        sweep.check_words({name: value for name, value in values.items() if name in sweep.VARIABLES})
    return values


def main(values: dict[str, str]) -> int:
    if "RUNS" not in values:
        return sweep_and_compare(values)
    write(values, labeled_paths(values["RUNS"]), Path(values.get("OUT", "report")).expanduser(), "Runs compared")
    return 0
