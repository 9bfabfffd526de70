"""Read TensorBoard's event files, as verl's ``trainer.logger=[tensorboard]`` writes them: scalars in float32."""

import struct
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.report.catalog import report_name
from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.readers.metrics import select_metrics


def read_tensorboard(label: str, path: Path) -> LoggedRun:
    """Read an event file, or all of one folder below ``path``, as several attempts of one run leave them.

    Raises:
        Refused: a record is damaged, or several folders contain events.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if "tfevents" in each.name)
    folders = {file.parent for file in files}
    if len(folders) > 1:
        raise Refused(f"{path}: contains events in {len(folders)} folders, each a run; give one of them")
    logged: dict[int, dict[str, float]] = {}
    notes: tuple[str, ...] = ()
    for file in files:
        whole, truncated = count_records(file)
        if truncated and not whole:
            raise Refused(f"{file}: is not an event file, or its first record is damaged")
        events = list(EventFileLoader(str(file)).Load())  # ends without an error at a damaged record
        if len(events) < whole:
            raise Refused(f"{file}: record {len(events) + 1} of {whole} is damaged")
        if truncated:
            notes += (f"the last record of {file.name}, record {whole + 1}, is half-written: left out",)
        for event in events:
            for value in event.summary.value:
                if report_name(value.tag):
                    logged.setdefault(event.step, {})[value.tag] = float(tensor_util.make_ndarray(value.tensor))
    steps = {step: select_metrics(data, str(path)) for step, data in logged.items()}
    return LoggedRun(label, path.name, "TensorBoard", steps, notes)


def count_records(file: Path) -> tuple[int, bool]:
    """Return the number of whole records of an event file, by their lengths, and whether a part of one follows.

    A record is its length in 8 bytes, a checksum of it in 4, the data, and a checksum of the data in 4.
    """
    size, at, whole = file.stat().st_size, 0, 0
    with file.open("rb") as content:
        while at + 12 <= size:
            content.seek(at)
            after = at + 12 + struct.unpack("<Q", content.read(8))[0] + 4
            if after > size:
                break
            at, whole = after, whole + 1
    return whole, at < size
