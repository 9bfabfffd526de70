"""Start a child process that does not outlive this one, and treat the signals that end a process alike."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from verl_precision.errors import Refused
from verl_precision.paths import REPO, SCRIPTS

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RUNNING: set[subprocess.Popen] = set()  # of json_lines
STARTING = threading.Lock()  # held while RUNNING changes
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


@contextmanager
def several_at_once() -> Iterator[ThreadPoolExecutor]:
    """Yield threads, one for each processor, in which :func:`json_lines` may run; an error ends its processes."""
    interrupt_on_signals()
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # no process starts for what waits in the queue
        with STARTING:
            for process in RUNNING:
                process.kill()
        raise
    finally:
        pool.shutdown()


def stdout_of_json() -> IO[str]:
    """Return this process's stdout, for the lines that :func:`json_lines` reads; what else is printed joins stderr."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lines


def json_lines(module: str, *words: str, environment: Mapping[str, str]) -> Iterator[dict]:
    """Run a module of this package without a GPU, in a process, and yield the JSON objects that it prints as they come.

    Args:
        module: after ``verl_precision.``; what it prints to stderr is dropped unless it fails.
        environment: beside this process's.

    Raises:
        Refused: it failed; the message has its last line.
    """
    common = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "ignore", "-m", f"verl_precision.{module}", *words]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    variables = os.environ | common | environment
    with tempfile.TemporaryFile("w+") as log:
        with STARTING:
            process = subprocess.Popen(command, cwd=SCRIPTS, env=variables, stderr=log, **streams)
            RUNNING.add(process)
        try:
            with process:
                yield from map(json.loads, process.stdout)
        finally:
            with STARTING:
                RUNNING.discard(process)
        if process.returncode:
            log.seek(0)
            last = log.read().strip().rpartition("\n")[2]
            raise Refused(f"{' '.join([module, *words])}: ended with exit code {process.returncode}: {last}")
