"""Make runs of the recall task: ``scripts/run.py`` in a process each, some side by side."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lib.collapse.grid import GridRun
from lib.format import duration, slug
from lib.paths import REPO
from lib.process import ignore_signals, start_child

POLL_S = 0.5
TAIL = 4  # lines of a run that failed which are shown


class ActiveRun:
    """A run under way, and its log, which is read as it is written."""

    def __init__(self, run: GridRun, out: Path, device: str):
        self.run, self.log = run, out / "logs" / f"{slug(run.name)}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, REPO / "scripts/run.py", *run.words(out, device)]
        with self.log.open("w") as file:
            self.process = start_child(command, REPO, os.environ, file)
        self.reader = self.log.open()

    def progress(self) -> list[str]:
        """Return the new lines on the run's progress: those that begin with the time elapsed."""
        return [line.rstrip() for line in self.reader if line.startswith("[")]

    def tail(self) -> list[str]:
        """Return the last lines of the log."""
        return self.log.read_text().splitlines()[-TAIL:]


def make_runs(
    runs: Sequence[GridRun], out: Path, device: str, parallel: int, finished: Callable[[GridRun], None]
) -> list[GridRun]:
    """Make the runs, ``parallel`` at a time, show their progress, and call ``finished`` after each that succeeds.

    Returns:
        The runs that failed.

    Raises:
        subprocess.CalledProcessError: a model could not be prepared; the command has printed why.
        KeyboardInterrupt: after all runs under way ended in order.
    """
    ahead, active, failed, started = list(runs), [], [], time.monotonic()
    try:
        while ahead or active:
            while ahead and len(active) < parallel:
                run = ahead.pop(0)
                subprocess.run(run.prepare_command(), cwd=REPO, check=True)
                active.append(ActiveRun(run, out, device))
            time.sleep(POLL_S)
            for each in [*active]:
                ended = each.process.poll() is not None  # before its last lines are read
                for line in each.progress():
                    print(f"{each.run.precision:>5} {line}", flush=True)
                if not ended:
                    continue
                active.remove(each)
                if each.process.returncode:
                    failed.append(each.run)
                    how = f"failed with exit code {each.process.returncode}: {each.log}"
                    print("\n".join(f"    {line}" for line in each.tail()))
                else:
                    finished(each.run)
                    how = "finished"
                elapsed = duration(time.monotonic() - started)
                print(f"[{elapsed:>6}] {each.run.name} {how}; {len(ahead) + len(active)} left", flush=True)
    except KeyboardInterrupt:
        ignore_signals()
        for each in active:
            each.process.send_signal(signal.SIGINT)
        for each in active:
            each.process.wait()
        raise
    return failed
