"""Read the files of verl's ``trainer.logger=[file]``, and OAT's ``metrics.jsonl`` without its folder."""

from pathlib import Path

from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.readers.metrics import read_metric_lines, single_file
from verl_precision.report.readers.oat import OAT_ROUND, adapt_oat_metrics


def read_file_logger(label: str, path: Path) -> LoggedRun:
    """Read verl's ``PROJECT/EXPERIMENT.jsonl``, or a patched OAT's ``metrics.jsonl`` without ``args.json``.

    Args:
        path: the file, or a folder with one.
    """
    file = single_file(path, ".jsonl")
    steps, notes = read_metric_lines(file)
    if OAT_ROUND in file.read_text(errors="replace"):
        return LoggedRun(label, file.stem, "a file of OAT", steps, (*notes, *adapt_oat_metrics(steps, {})))
    return LoggedRun(label, file.stem, "verl's file logger", steps, notes)
