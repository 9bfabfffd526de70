"""Write a report, and rebuild it from the runs that it keeps.

``index.html`` and ``figures/``; ``outcomes.csv`` and ``verdicts.csv``; and in ``runs/`` the runs, reduced to what a
report reads: a report on those has the same numbers.
"""

import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.files import check_room, write_json
from verl_precision.report.content import Report, build_report
from verl_precision.report.figures import write_figures
from verl_precision.report.readers import RECORD, read_all, read_json
from verl_precision.report.render import page, write_tables
from verl_precision.report.statistics import THRESHOLD

SETTINGS = "report.json"  # the title, the labels and the runs of a report


def write_report(
    pairs: Sequence[tuple[str, Path]], out: Path, threshold: float = THRESHOLD, title: str = "Runs compared"
) -> Report:
    """Read the runs, each a label and its folder or file, and replace the report in ``out``.

    Args:
        threshold: the reward that the moving mean has to exceed.

    Raises:
        Refused: a run cannot be used, there is none, or ``out`` contains something else or cannot be written to;
            nothing is changed then.
    """
    if not pairs:
        raise Refused("RUNS: there is no run to report on")
    if out.exists() and not out.is_dir() or out.is_dir() and any(out.iterdir()) and not (out / SETTINGS).exists():
        raise Refused(f"OUT={out}: is not empty and contains no report; choose another folder")
    check_room(out)
    report = build_report(read_all(list(pairs)), threshold, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        for part, write in (("tables", write_tables), ("figures", write_figures), ("runs", write_runs)):
            print(f"writing {part}", flush=True)
            write(report, new)
        (new / "index.html").write_text(page(report))
        if out.exists():
            os.replace(out, Path(scratch, "old"))
        os.replace(new, out)
    return report


def write_runs(report: Report, out: Path) -> None:
    """Write the runs, reduced to what a report reads, and ``report.json``, from which the report is rebuilt."""
    for entry in report.entries:
        run, folder = entry.run, out / "runs" / entry.id
        folder.mkdir(parents=True)
        lines = [
            json.dumps({"step": step, "data": {k: None if math.isnan(v) else v for k, v in data.items()}})
            for step, data in sorted(run.steps.items())
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        for name, content in (("run.json", run.run), ("summary.json", run.summary)):
            if content:
                write_json(folder / name, content)
        config = {key: value for key, value in run.config.items() if key in report.differs}
        record = {"name": run.name, "source": run.source, "seed": run.seed, "notes": run.notes, "config": config}
        write_json(folder / RECORD, record)
    runs = [[entry.run.label, f"runs/{entry.id}"] for entry in report.entries]
    write_json(out / SETTINGS, {"title": report.title, "threshold": report.threshold, "runs": runs})


def rebuild(folder: Path, out: Path) -> Report:
    """Write the report of ``folder`` anew, from the runs that its ``report.json`` names.

    Raises:
        Refused: ``folder`` contains no report; as :func:`write_report`.
    """
    file = folder / SETTINGS
    if not file.is_file():
        raise Refused(f"FROM={folder}: contains no {SETTINGS}; give the folder of a report")
    settings = read_json(file)
    if not {"title", "threshold", "runs"} <= settings.keys() or any(len(pair) != 2 for pair in settings["runs"]):
        raise Refused(f"{file}: must contain title, threshold and runs, a list of [LABEL, FOLDER]")
    pairs = [(label, folder / run) for label, run in settings["runs"]]
    return write_report(pairs, out, settings["threshold"], settings["title"])
