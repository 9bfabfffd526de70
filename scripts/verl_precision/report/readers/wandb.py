"""Read wandb's own log of a run, ``run-ID.wandb``, which it writes online and offline.

wandb 0.31 has no reader of it in Python: the records are read here, their content by wandb's own protobuf.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.report.catalog import Steps
from verl_precision.report.logged_run import LoggedRun
from verl_precision.report.readers.config import flatten, with_hash
from verl_precision.report.readers.metrics import select_metrics, single_file
from verl_precision.report.readers.oat import OAT_ROUND, adapt_oat_metrics

BLOCK = 32768  # bytes


class HalfWritten(Exception):
    """A file ends within a record."""


def read_wandb(label: str, path: Path) -> LoggedRun:
    """Read a ``run-ID.wandb`` file, or the folder that contains it.

    Raises:
        Refused: the file is not wandb's, or damaged.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    file = single_file(path, ".wandb")
    steps: Steps = {}
    tree: dict = {}
    name, notes = file.stem, ()
    number = 0
    try:
        for number, content in enumerate(wandb_records(file), 1):  # noqa: B007
            record = Record.FromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                data = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
                if selected := select_metrics(data, f"{file}: record {number}"):
                    step = data.get(OAT_ROUND, record.history.step.num)
                    steps.setdefault(int(step), {}).update(selected)
            elif kind == "run":
                name = record.run.display_name or name
                tree |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "config":
                tree |= {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.config.update}
    except HalfWritten:
        notes = (f"the last record of {file.name}, record {number + 1}, is half-written: left out",)
    tree.pop("_wandb", None)
    flat = flatten(tree)
    of_oat = {"pretrain", "critic_type"} <= flat.keys()
    source = "wandb, of OAT" if of_oat else "wandb"
    notes += adapt_oat_metrics(steps, flat) if of_oat else ()
    seed = flat.get("seed" if of_oat else "data.seed")
    config = with_hash(flat) if flat else {}
    return LoggedRun(label, name, source, steps, notes, seed if isinstance(seed, int) else None, **config)


def wandb_records(file: Path) -> Iterator[bytes]:
    """Yield the records of wandb's log: LevelDB's format (its doc/log_format.md) after a header of seven bytes.

    A block is 32 KiB; a record is one or more chunks, each with checksum, length and kind (whole, first, middle, last).

    Raises:
        HalfWritten: the file ends within a record, as that of a run in progress does.
        Refused: it is no such file, or a checksum is wrong.
    """
    content, at, parts = file.read_bytes(), 7, b""
    if content[:4] != b":W&B":
        raise Refused(f"{file}: is not a wandb file")
    while at < len(content):
        if BLOCK - at % BLOCK < 7:  # no room for a chunk's head: padding
            at += BLOCK - at % BLOCK
            continue
        if at + 7 > len(content):
            raise HalfWritten
        checksum, length, kind = struct.unpack_from("<IHB", content, at)
        data = content[at + 7 : at + 7 + length]
        if len(data) < length:
            raise HalfWritten
        if zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            raise Refused(f"{file}: the checksum of the record at byte {at} is wrong: the file is damaged")
        at += 7 + length
        parts += data
        if kind in (1, 4):
            yield parts
            parts = b""
    if parts:
        raise HalfWritten
