"""Start, find, await and kill the processes of a run, wherever Ray and vLLM start them."""

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
from support.waiting import TIMEOUT_S, wait_until

from verl_precision.paths import REPO

MARK = "VERL_FILE_LOGGER_PATH"  # the path of a run's metrics, which all its processes inherit


def of_this_run(out: Path) -> list[psutil.Process]:
    """Return the processes of the run in ``out``."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(out / "verl.jsonl"):
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return processes


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Return the shared memory files that these processes map; some of the processes may have ended."""
    mapped = ""
    for process in processes:
        try:
            mapped += Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
    return {file for file in Path("/dev/shm").iterdir() if str(file) in mapped}


def kill(processes: list[psutil.Process]) -> None:
    """Kill all processes and wait until they have ended; the parent of some may be stopped and not notice."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    wait_until(lambda: all(map(ended, processes)), "the end of killed processes")


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], object], process: subprocess.Popen, log: Path) -> None:
    """Wait for the condition; fail with the log if the process ends before."""

    def met() -> bool:
        done = bool(condition())
        assert done or process.poll() is None, log.read_text()
        return done

    wait_until(met, f"what {log} waits for")


def run_to_end(
    command: list, environment: Mapping[str, object], out: Path, log: Path, cwd: Path | str = REPO
) -> list[str]:
    """Run a command that trains into ``out`` to its end, kill what it leaves, and return the lines of its ``log``."""
    variables = os.environ | {MARK: str(out / "verl.jsonl"), "OMP_NUM_THREADS": "1"}
    variables["RAY_raylet_start_wait_time_s"] = "600"  # the default, 30, is too short on a busy machine
    variables |= {name: str(value) for name, value in environment.items()}
    with log.open("w") as output:
        main = subprocess.Popen(command, cwd=cwd, env=variables, stdout=output, stderr=output)
    try:
        code = main.wait(TIMEOUT_S)  # some never end after one of their processes has died
    finally:
        main.kill()
        kill(of_this_run(out))
    lines = log.read_text().splitlines()
    assert code == 0, "\n".join(lines[-60:])
    return lines
