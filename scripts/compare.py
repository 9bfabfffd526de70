"""Runs side by side: ``scripts/compare.py NAME=VALUE ...`` with the variables of ``make compare``.

Takes runs that are there, ``RUNS="LABEL=FOLDER …"``: folders of ``make run``, finished or not, verl's file logger,
TensorBoard events and wandb's files. Or does them first, ``PRECISION="fp16 bf16" SEED="1 2 3"``, with all that ``make
run`` takes. Writes a report that works offline, with figures, tables and the runs that it was made from.

Exit code 0: done; 1: refused, or a run failed; 130: interrupted, with the report on what was finished.
"""

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lib.errors import Refused
from lib.report.build import write_report
from lib.report.readers.dispatch import labelled_paths
from lib.report.statistics import THRESHOLD
from lib.report.tables import on_screen
from lib.run import job as jobs
from lib.run import sweep

OF_REPORT = {
    "RUNS": "LABEL=FOLDER …, a label again for each seed: folders of make run, TensorBoard, .jsonl, .wandb, .csv",
    "OUT": "with RUNS the report's folder, default report; else that of runs and reports, default outputs/compare/…",
    "THRESHOLD": "the reward that the mean of five steps has to exceed, default 0.95",
    "TITLE": "of the report, default: Runs compared",
    "NOSPEED": "why no speed may be claimed for any run, as 'the machine was shared', default none",
}
VARIABLES = OF_REPORT | {name: text for name, text in sweep.VARIABLES.items() if name not in OF_REPORT}


def usage() -> str:
    groups = {group: ", ".join(jobs.options(group)) for group in ("experiment", "precision", "algo", "recipe")}
    return "\n".join(f"  {name:<11} {text.format(**groups)}" for name, text in VARIABLES.items())


def number(given: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(given.get(name, default))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise Refused(f"{name}={given[name]}: must be a number")
    return value


def write(
    given: Mapping[str, str], pairs: Sequence[tuple[str, Path]], out: Path, title: str, expected: Sequence[str] = ()
) -> None:
    """Write the report and show its essence."""
    threshold = number(given, "THRESHOLD", THRESHOLD)
    told = write_report(pairs, out, threshold, given.get("TITLE", title), expected, given.get("NOSPEED", ""))
    print(f"\n{on_screen(told)}\n\n  {out / 'index.html'}\n")


def of_runs(given: Mapping[str, str]) -> int:
    if others := [name for name in given if name not in (*OF_REPORT, "DEVICE")]:  # make hands on the environment's
        raise Refused(f"{others[0]}={given[others[0]]}: RUNS takes runs that are there; leave one of the two out")
    write(given, labelled_paths(given["RUNS"]), Path(given.get("OUT", "report")).expanduser(), "Runs compared")
    return 0


def of_sweep(given: Mapping[str, str], words: list[str]) -> int:
    number(given, "THRESHOLD", THRESHOLD)  # refused before hours of training
    chosen = sweep.plan({name: value for name, value in given.items() if name in sweep.VARIABLES})
    outcome = sweep.run(chosen)
    expected = list(dict.fromkeys(run.label for run in chosen.runs))
    for objective, pairs in outcome.finished.items():
        title = f"{chosen.experiment}, {objective}"
        write(given, pairs, chosen.out / objective / "report", title, expected)
    for run in outcome.failed:
        print(f"failed, and not in the report: {run}, {run.out / 'train.log'}")
    if outcome.code:
        print(f"to go on:  {shlex.join([sys.executable, str(Path(__file__).resolve()), *words])}")
    return outcome.code


def main(words: list[str]) -> int:
    if words in (["--help"], ["-h"]):
        print(f"{__doc__}\n{usage()}")
        return 0
    given = jobs.named(words, VARIABLES)
    if "RUNS" in given:
        return of_runs(given)
    if not given.keys() - {*OF_REPORT, "DEVICE"}:
        raise Refused(
            "RUNS: there is no run; give RUNS='LABEL=FOLDER …', or what to run, as PRECISION='fp16 bf16' SEED='1 2 3'"
        )
    return of_sweep(given, words)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as refusal:
        sys.exit(f"compare: {refusal}")
    except KeyboardInterrupt:  # nothing had started, or the report, which is put in its place as a whole
        sys.exit(130)
