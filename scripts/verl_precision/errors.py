"""The error by which every command refuses a request, and a clause for errors of the system."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


class Refused(Exception):
    """The request cannot be carried out; the message is one line that names what is wrong and what to do."""


@contextlib.contextmanager
def adding(clause: str, folder: Path | None = None) -> Iterator[None]:
    """Add a clause to the message of an OSError, and the folder that was written to if the error names no file."""
    try:
        yield
    except OSError as fault:
        fault.strerror = f"{fault.strerror or fault}; {clause}"
        fault.filename = fault.filename or folder and str(folder)
        raise
