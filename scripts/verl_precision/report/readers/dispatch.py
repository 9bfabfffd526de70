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
from verl_precision.report.readers.oat import OAT_ARGS, read_oat
from verl_precision.report.readers.run_folder import RECORD, read_recorded, read_run_folder
from verl_precision.report.readers.tensorboard import read_tensorboard
from verl_precision.report.readers.verl_file_logger import read_file_logger
from verl_precision.report.readers.wandb import read_wandb
from verl_precision.report.readers.wandb_csv import read_csv, split_run_name
from verl_precision.words import options, shell_words

LABEL = re.compile(r"[A-Za-z0-9][\w.+-]*")
Reader = Callable[[str, Path], LoggedRun]
BY_SUFFIX: dict[str, Reader] = {".wandb": read_wandb, ".jsonl": read_file_logger, ".csv": read_csv}


def labelled_paths(value: str) -> list[tuple[str, Path]]:
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
    labels: dict[Path, str] = {}
    runs: list[LoggedRun] = []
    for label, path in pairs:
        place = path.resolve()
        if place in labels:
            raise Refused(f"{label}={path}: is the same path as that of {labels[place]}; leave one out")
        labels[place] = label
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
    precision, effective = run.settings.get("PRECISION"), run.effective_regime
    if precision and label in options("precision") and label not in (precision, effective):
        other = effective not in (None, precision)
        computed, name = (f" that computed in {effective}", effective) if other else ("", "so")
        which = f"is a run with PRECISION={precision}{computed}"
        raise Refused(f"{label}={path}: {which}; label it {name}, or unlike any regime")
    return note_non_finite(run)


def choose_reader(path: Path) -> Reader:
    """Return the reader of a file or a folder, by the names of its files.

    Raises:
        Refused: nothing exists there, or nothing that a reader knows.
    """
    file, _ = split_run_name(path)
    if file.is_dir():
        inside = [each for each in sorted(file.iterdir()) if each.is_file()]
        if any(each.name in ("metrics.jsonl", "verl.jsonl") for each in inside):
            if (file / RECORD).exists():
                return read_recorded
            return read_oat if (file / OAT_ARGS).exists() else read_run_folder
        for suffix, reader in BY_SUFFIX.items():
            if any(each.suffix == suffix for each in inside):
                return reader
        if any("tfevents" in each.name for each in file.rglob("*")):
            return read_tensorboard
        raise Refused(
            f"{path}: contains no metrics: no metrics.jsonl, no TensorBoard events, no .jsonl, .wandb or .csv file"
        )
    if not file.exists():
        raise Refused(f"{path}: does not exist")
    if file.suffix in BY_SUFFIX:
        return BY_SUFFIX[file.suffix]
    if "tfevents" in file.name:
        return read_tensorboard
    raise Refused(f"{path}: is not a run; give a run's folder, TensorBoard events or a .jsonl, .wandb or .csv file")


def note_non_finite(run: LoggedRun) -> LoggedRun:
    """Return the run with a note on each metric that was not finite at some step."""
    notes = []
    for metric in dict.fromkeys(METRIC.values()):
        bad = [step for step in sorted(run.steps) if math.isnan(run.steps[step].get(metric, 0.0))]
        logged = sum(metric in data for data in run.steps.values())
        if bad and len(bad) == logged:
            notes.append(f"{metric} is NaN or inf at every step: it has no value")
        elif bad:
            notes.append(f"{metric} is NaN or inf at {len(bad)} of {logged} steps, first at {bad[0]}: left out there")
    return replace(run, notes=(*run.notes, *(note for note in notes if note not in run.notes)))
