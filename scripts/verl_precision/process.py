"""Start a child process that does not outlive this one, and treat the signals that end a process alike."""

import ctypes
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent has ended


def interrupt_on_signals() -> None:
    """Treat SIGTERM and SIGHUP like SIGINT: each raises KeyboardInterrupt."""
    for number in ENDING_SIGNALS:  # SIGINT too: a process that a shell starts in the background ignores it
        signal.signal(number, signal.default_int_handler)


def ignore_signals() -> None:
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def start_child(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], output: IO[str] | int
) -> subprocess.Popen:
    """Start ``command`` in ``folder`` and a separate session, with only this environment, and without stdin.

    Ctrl-C on the terminal reaches only this process, which decides how the child ends. The child gets SIGTERM if this
    process is killed. Its stdout and stderr go to ``output``, an open file or ``subprocess.PIPE`` for text.
    """
    libc = ctypes.CDLL(None)
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )
