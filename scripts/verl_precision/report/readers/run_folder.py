"""Read runs of ``make run`` from their folder, finished or not, or from the copy that a report keeps in ``runs/``."""

from pathlib import Path

from verl_precision.report.catalog import Steps
from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.readers.config import read_composed_config, read_json
from verl_precision.report.readers.metrics import read_metric_lines
from verl_precision.run.folder import finished
from verl_precision.run.log import reports

RECORD = "record.json"  # beside the metrics in a report's runs/: what the run's own folder has in other files


def read_run_folder(label: str, folder: Path) -> LoggedRun:
    """Read a folder of ``make run``: the metrics merged as ``merge_metrics`` does, without touching the folder.

    The workers' reports of an unfinished run are in its log.
    """
    steps, notes = {}, ()
    for name in ("metrics.jsonl", "verl.jsonl"):
        if (folder / name).exists():
            more, more_notes = read_metric_lines(folder / name)
            notes += more_notes
            for step, data in more.items():
                steps.setdefault(step, {}).update(data)
    log = folder / "train.log"
    unfinished = log.exists() and not finished(folder)
    lines = log.read_text(errors="replace").splitlines() if unfinished else []
    facts = {"name": folder.name, "source": "make run", "notes": notes, "reports": reports(lines)}
    return with_json_files(label, folder, steps, facts | read_composed_config(folder))


def read_recorded(label: str, folder: Path) -> LoggedRun:
    """Read a run as a report keeps it."""
    steps, notes = read_metric_lines(folder / "metrics.jsonl")
    facts = read_json(folder / RECORD)
    reported = facts.pop("told")
    return with_json_files(label, folder, steps, facts | {"notes": (*facts["notes"], *notes), "reports": reported})


def with_json_files(label: str, folder: Path, steps: Steps, facts: dict) -> LoggedRun:
    """Return the run of ``facts`` with the folder's ``run.json`` and ``summary.json``, as far as they exist."""
    files = (folder / "run.json", folder / "summary.json")
    run, summary = (read_json(file) if file.exists() else {} for file in files)
    seed = run.get("settings", {}).get("SEED", facts.get("seed"))
    lists = {name: tuple(facts[name]) for name in ("notes", "reports")}
    return LoggedRun(label=label, steps=steps, **facts | lists | {"seed": seed, "run": run, "summary": summary})


def record(run: LoggedRun) -> dict:
    """Return the content of ``RECORD``: what ``read_recorded`` needs beside the other files of the run."""
    return {
        "name": run.name,
        "source": run.source,
        "seed": run.seed,
        "notes": run.notes,
        "told": run.reports,  # the key of the first reports, which are recorded
        "config": run.config,
        "config_hash": run.config_hash,
    }
