"""Choose the reader of each run, and check what was read."""

import glob
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.report.catalog import METRIC, UNTRAINED
from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.readers.metrics import read_metric_lines
from verl_precision.report.readers.oat import OAT_ARGS, OAT_ROUND, adapt_oat_metrics, read_oat
from verl_precision.report.readers.run_folder import RECORD, read_kept_run, read_run_folder
from verl_precision.report.readers.tensorboard import read_tensorboard
from verl_precision.report.readers.wandb_csv import read_csv, split_run_name
from verl_precision.words import options, shell_words

LABEL = re.compile(r"[A-Za-z0-9][\w.+-]*")
Reader = Callable[[str, Path], LoggedRun]


def labeled_paths(value: str) -> list[tuple[str, Path]]:
    """Return the pairs of ``LABEL=PATH …``. A path may be a pattern: ``fp16=outputs/*/grpo-fp16-seed*``.

    Raises:
        Refused: a word is of another form, or nothing exists at a path.
    """
    pairs = []
    for word in shell_words("RUNS", value):
        label, sign, path = word.partition("=")
        if not sign or not LABEL.fullmatch(label):
            raise Refused(f"{word}: must be LABEL=FOLDER; a label may contain letters, digits and . _ + -")
        if not path:
            raise Refused(f"{word}: {label} has no run; give its folder, or leave it out")
        pattern = str(Path(path).expanduser())
        paths = [pattern] if Path(split_run_name(Path(pattern))[0]).exists() else sorted(glob.glob(pattern))
        if not paths:
            raise Refused(f"{word}: {label} has no run; there is nothing at {path}")
        pairs += [(label, Path(each)) for each in paths]
    return pairs


def read_all(pairs: list[tuple[str, Path]]) -> list[LoggedRun]:
    """Read the run of each label and path.

    Raises:
        Refused: one cannot be read, occurs twice, or is not of the regime that its label names.
    """
    runs: list[LoggedRun] = []
    for label, path in pairs:
        run = read(label, path)
        for other in runs:
            if repr(other.steps) == repr(run.steps):  # NaN is not equal to itself
                raise Refused(f"{label}={path}: has exactly the metrics of {other.label}={other.name}; leave one out")
        runs.append(run)
    return runs


def read(label: str, path: Path) -> LoggedRun:
    """Read the run at a path, whatever logged it.

    Raises:
        Refused: there is none, a line of it is broken, or it is not of the regime that its label names.
    """
    run = choose_reader(path)(label, path)
    run = replace(run, steps={step: data for step, data in run.steps.items() if data.keys() - UNTRAINED})
    if not run.steps:
        raise Refused(f"{label}={path}: has no training step; a report uses none of its metrics")
    regimes = list(dict.fromkeys(filter(None, (run.settings.get("PRECISION"), run.effective_regime))))
    if "PRECISION" in run.settings and label in options("precision") and label not in regimes:
        which = f"is a run with PRECISION={' that computed in '.join(regimes)}"
        raise Refused(f"{label}={path}: {which}; label it {regimes[-1]}, or unlike any regime")
    return replace(run, notes=(*run.notes, *(note for note in notes_on_nan(run) if note not in run.notes)))


def choose_reader(path: Path) -> Reader:
    """Return the reader of a file or a folder, by the names of its files.

    Raises:
        Refused: nothing exists there, or nothing that a reader knows.
    """
    file, _ = split_run_name(path)
    if not file.exists():
        raise Refused(f"{path}: does not exist")
    names = {each.name for each in file.iterdir()} if file.is_dir() else {file.name}
    if file.is_dir() and names & {"metrics.jsonl", "verl.jsonl"}:
        return read_kept_run if RECORD in names else read_oat if OAT_ARGS in names else read_run_folder
    if any(name.endswith(".jsonl") for name in names):
        return read_file_logger
    if any(name.endswith(".csv") for name in names):
        return read_csv
    if any("tfevents" in each.name for each in (file.rglob("*") if file.is_dir() else [file])):
        return read_tensorboard
    what = "contains no metrics" if file.is_dir() else "is not a run"
    raise Refused(f"{path}: {what}; give a run's folder, TensorBoard events, a .jsonl file or W&B's CSV export")


def read_file_logger(label: str, path: Path) -> LoggedRun:
    """Read verl's ``PROJECT/EXPERIMENT.jsonl``, or a patched OAT's ``metrics.jsonl`` without ``args.json``.

    Args:
        path: the file, or a folder with one.

    Raises:
        Refused: the folder contains several.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.jsonl"))
    if len(files) > 1:
        raise Refused(f"{path}: contains {len(files)} .jsonl files, each a run; give one of them")
    steps, notes = read_metric_lines(files[0])
    if OAT_ROUND in files[0].read_text(errors="replace"):
        return LoggedRun(label, files[0].stem, "a file of OAT", steps, (*notes, *adapt_oat_metrics(steps, {})))
    return LoggedRun(label, files[0].stem, "verl's file logger", steps, notes)


def notes_on_nan(run: LoggedRun) -> list[str]:
    """Return a note on each metric that was not finite at some step."""
    notes = []
    for metric in dict.fromkeys(METRIC.values()):
        bad = [step for step in sorted(run.steps) if math.isnan(run.steps[step].get(metric, 0.0))]
        logged = sum(metric in data for data in run.steps.values())
        if bad and len(bad) == logged:
            notes.append(f"{metric} is NaN or inf at every step: it has no value")
        elif bad:
            notes.append(f"{metric} is NaN or inf at {len(bad)} of {logged} steps, first at {bad[0]}: left out there")
    return notes
