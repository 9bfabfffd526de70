"""Find, await and kill the processes of a run, wherever Ray and vLLM start them."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def of_this_run(out: Path) -> list[psutil.Process]:
    """Return the processes of the run in ``out``, which all inherit the path of its metrics."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("VERL_FILE_LOGGER_PATH") == str(out / "verl.jsonl"):
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
    """Kill all processes; some may have ended."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen, log: Path, limit_s: float) -> None:
    """Wait for the condition. Fail with the log if the process ends or the limit is exceeded."""
    begin = time.monotonic()
    while not condition():
        assert process.poll() is None and time.monotonic() - begin < limit_s, log.read_text()
        time.sleep(0.02)
