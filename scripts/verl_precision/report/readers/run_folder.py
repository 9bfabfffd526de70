"""Read runs of ``make run`` from their folder, finished or not, or from the copy that a report keeps in ``runs/``."""

import re
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.report.catalog import Steps
from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.readers.metrics import read_json, read_metric_lines
from verl_precision.run.folder import finished
from verl_precision.run.log import reports
from verl_precision.run.summary import agreed, by_role

RECORD = "record.json"  # in a report's runs/, beside the metrics: what the run's folder has in other files
# Keys of seeds, names and folders, which differ between the runs of a label.
OF_ONE_RUN = re.compile(
    r"(.*[._])?seed|trainer\.(project_name|experiment_name|default_local_dir|(validation|rollout)_data_dir)"
    r"|save_path|wb_\w+|master_(addr|port)"  # OAT's
)


def read_run_folder(label: str, folder: Path) -> LoggedRun:
    """Read a folder of ``make run``: the metrics merged as by ``merge_metrics``, without touching the folder.

    The workers' reports of an unfinished run are in its log.
    """
    steps: Steps = {}
    notes: tuple[str, ...] = ()
    for name in ("metrics.jsonl", "verl.jsonl"):
        if (folder / name).exists():
            more, more_notes = read_metric_lines(folder / name)
            notes += more_notes
            for step, data in more.items():
                steps.setdefault(step, {}).update(data)
    run, summary, log = read_if_present(folder / "run.json"), {}, folder / "train.log"
    if finished(folder):
        summary = read_json(folder / "summary.json")
    elif log.exists():
        summary = summarize_reports(reports(log.read_text(errors="replace").splitlines()))
    seed = run.get("settings", {}).get("SEED")
    return LoggedRun(label, folder.name, "make run", steps, notes, seed, read_composed_config(folder), run, summary)


def read_kept_run(label: str, folder: Path) -> LoggedRun:
    """Read a run as a report keeps it."""
    steps, notes = read_metric_lines(folder / "metrics.jsonl")
    record = read_json(folder / RECORD)
    run, summary = (read_if_present(folder / name) for name in ("run.json", "summary.json"))
    name, source, seed, config = (record[key] for key in ("name", "source", "seed", "config"))
    return LoggedRun(label, name, source, steps, (*record["notes"], *notes), seed, config, run, summary)


def read_if_present(file: Path) -> dict:
    """Return the content of a JSON file, {} if there is none."""
    return read_json(file) if file.exists() else {}


def summarize_reports(reported: list[dict]) -> dict:
    """Return what a summary has of the workers' reports, {} without any."""
    if not reported:
        return {}
    dtypes = {role: agreed(of_role) for role, of_role in by_role(reported).items()}
    return {"effective_dtypes": dtypes, "patch_stamp": agreed([each["stamp"] for each in reported])}


def read_composed_config(folder: Path) -> dict:
    """Return the configuration that Hydra wrote into a run's folder; {} if it is missing."""
    import yaml

    file = folder / "hydra" / "config.yaml"
    if not file.exists():
        return {}
    try:
        return comparable_config(yaml.load(file.read_text(), Loader=yaml.CSafeLoader) or {})
    except yaml.YAMLError as error:
        raise Refused(f"{file}: is not YAML: {' '.join(str(error).split())}") from error


def comparable_config(tree: dict, prefix: str = "") -> dict:
    """Return a configuration as flat keys ``a.b.c``, without seeds, names and folders; an empty dict stays a value."""
    flat = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            flat |= comparable_config(value, f"{key}.")
        elif not OF_ONE_RUN.fullmatch(key):
            flat[key] = value
    return flat
