"""Write files as a whole, hash them, and read JSON lines."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from verl_precision.errors import Refused

FREE_GIB = 1.0  # the least room for OUT: two checkpoints of the sanity task take some 20 MB, a log a few


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def replace_files(contents: Mapping[Path, bytes | None], scratch: Path) -> None:
    """Replace each file by its new content, and delete it where that is None.

    All is written to the disk of the folder ``scratch`` first, so that a full disk changes no file. After a kill the
    same call completes the change.
    """
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".new-") as folder:
        written = {path: Path(folder, str(number)) for number, path in enumerate(contents)}
        for path, temporary in written.items():
            if (content := contents[path]) is not None:
                temporary.write_bytes(content)
        for path, temporary in written.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, path) if temporary.exists() else path.unlink(missing_ok=True)


def write_json(file: Path, content: dict) -> None:
    """Replace ``file`` atomically."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(file)


def read_jsonl(file: Path) -> list[dict]:
    """Return the objects of a JSON-lines file, none if it does not exist, without a last line that is incomplete."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def check_room(out: Path) -> None:
    """Refuse a folder that cannot be created on its disk, or a disk with less than ``FREE_GIB`` free."""
    folder = next(folder for folder in (out, *out.parents) if folder.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise Refused(f"OUT={out}: cannot be written to ({error.strerror}); choose another folder") from error
    free = shutil.disk_usage(folder).free / 2**30
    if free < FREE_GIB:
        raise Refused(f"OUT={out}: {free:.2f} GiB free on its disk, {FREE_GIB} needed; free space or choose another")
