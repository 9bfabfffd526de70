"""The processes of a run, wherever Ray and vLLM put them."""

from pathlib import Path

import psutil


def of_this_run(out: Path) -> list[psutil.Process]:
    """The processes that were started for the run in ``out``: all inherit the path of its metrics."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("VERL_FILE_LOGGER_PATH") == str(out / "verl.jsonl"):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """The files of shared memory that these processes map, of which some may have ended."""
    mapped = ""
    for process in processes:
        try:
            mapped += Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
    return {file for file in Path("/dev/shm").iterdir() if str(file) in mapped}


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL to all, of which some may have ended."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)
