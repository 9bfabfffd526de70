"""The process from which ranks are forked: it has imported all that does not depend on the tree under test.

    forked_ranks.py MODULE ...

It imports the modules, reads a job a line, and answers with a line on how it ended. It must have no threads, which do
not survive a fork: it opens no process group, and OMP_NUM_THREADS is 1. ``support.fork_server`` starts it.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@dataclass(frozen=True)
class Job:
    """A program and the processes that run it."""

    words: list[str]  # SCRIPT ARGUMENT ..., or -m MODULE ARGUMENT ...
    environment: dict[str, str]  # of every process; PYTHONPATH is searched first
    logs: str  # a folder: process N writes what it prints into rank_N.log
    ranks: int  # processes of the process group
    others: int  # processes outside it, whose RANK is not below WORLD_SIZE
    limit_s: float


@dataclass(frozen=True)
class Finished:
    """How the processes of a job ended."""

    codes: list[int]
    first: int | None  # the number of the process that failed first and ended the others
    late: bool  # they did not end within the limit


def program(words: list[str]) -> None:
    """Run a script or, after ``-m``, a module as Python would."""
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def die_with_the_server() -> None:
    """Have the kernel kill this fork when the server dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(job: Job, number: int, port: int) -> int:
    """Fork a process of the job, whose ranks meet at the store on ``port``; return its process id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        die_with_the_server()
        log = os.open(f"{job.logs}/rank_{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(job.environment)
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
        os.environ.update(WORLD_SIZE=str(job.ranks), LOCAL_WORLD_SIZE=str(job.ranks))
        # The ranks do not host the store, as under torchrun.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
        sys.path[:0] = filter(None, job.environment.get("PYTHONPATH", "").split(":"))
        program(job.words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start_store() -> tuple[int, int]:
    """Fork the process that hosts the store of a job's process group; return its process id and its port."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        with os.fdopen(reader) as answer:
            return pid, int(answer.readline())
    die_with_the_server()
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, f"{store.port}\n".encode())
    while True:
        time.sleep(3600)


def stop(pids: Sequence[int]) -> None:
    """Kill processes with all that they have started."""
    for pid in pids:
        for kill in (os.killpg, os.kill):
            try:
                kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no group yet, or has ended
                pass


def run(job: Job) -> Finished:
    """Run a job, and end all its processes with the first that fails, or at its limit."""
    for number in range(job.ranks + job.others):
        Path(f"{job.logs}/rank_{number}.log").touch()  # a process that is killed before it opens its log has one, too
    store, port = start_store()
    numbers = {start(job, number, port): number for number in range(job.ranks + job.others)}
    codes: dict[int, int] = {}
    first, late = None, False
    signal.setitimer(signal.ITIMER_REAL, job.limit_s)
    try:
        while len(codes) < len(numbers):
            try:
                pid, status = os.wait()
            except TimeoutError:
                late = True
                stop(list(numbers))
                continue
            codes[numbers[pid]] = os.waitstatus_to_exitcode(status)
            if codes[numbers[pid]] and first is None and not late:
                first = numbers[pid]
                stop([other for other in numbers if numbers[other] not in codes])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        stop([store, *(pid for pid, number in numbers.items() if number not in codes)])
        os.waitpid(store, 0)
    return Finished([codes[number] for number in sorted(codes)], first, late)


def end_of_time(signum: int, frame: object) -> None:
    raise TimeoutError


def serve(preload: Sequence[str]) -> None:
    """Import modules, and run the jobs of standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some modules print when they are imported
    sys.path.pop(0)  # this file's folder
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # verl and DeepSpeed collect often: exclude everything imported so far
    signal.signal(signal.SIGALRM, end_of_time)
    for line in sys.stdin:
        print(json.dumps(asdict(run(Job(**json.loads(line))))), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
