"""Define a step of the verification, a program that leaves files, and run it."""

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lib.paths import REPO
from lib.process import start_child

Command = list[str | Path]
GRACE_S = 30.0  # for a program to end its children after SIGTERM
REASON_LINES = 6  # of a failed program's log in the report


@dataclass(frozen=True)
class Target:
    """What is verified: a ``device``, "cuda" or "cpu", and the folder ``work`` of the steps' files and logs.

    On a CPU every step is as small as it can be: it tests the step, not the device.
    """

    device: str
    work: Path

    @property
    def small(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class Step:
    """One or more programs, run in turn.

    Attributes:
        stage: what it belongs to.
        needs: the modules that it imports; it is skipped where one of them is not installed.
        commands: returns their command lines, from the target and the folder for what they write.
        values: returns what the report contains of that folder, as JSON has it.
        figures: the images in that folder that go beside the report, as patterns.
        limit_s: the time after which a program has failed, on a GPU; on a CPU ten times as long.
    """

    stage: str
    name: str
    needs: tuple[str, ...]
    commands: Callable[[Target, Path], list[Command]]
    values: Callable[[Path], dict[str, Any]]
    figures: tuple[str, ...] = ()
    limit_s: float = 300.0

    def skipped(self) -> dict[str, Any] | None:
        """Return the result of a step that cannot run here; None if it can."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return {"status": "skipped", "reason": f"not installed: {', '.join(missing)}"} if missing else None

    def run(self, target: Target) -> dict[str, Any]:
        """Run the programs and return their result.

        Returns:
            ``status``: passed, failed or skipped; ``seconds``; ``reason`` unless it passed; ``values`` if it did;
            ``files``: the figures' paths.
        """
        if result := self.skipped():
            return result
        out = target.work / self.name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        log = out.with_suffix(".log")
        limit_s = self.limit_s * (10 if target.small else 1)
        begin = time.monotonic()
        with log.open("w") as output:
            codes = (run_to_end(command, output, limit_s) for command in self.commands(target, out))
            code = next((code for code in codes if code != 0), 0)
        result = {"status": "passed", "seconds": round(time.monotonic() - begin, 1)}
        if code is None:
            return result | {"status": "failed", "reason": f"did not end within {limit_s:g} s; {log}"}
        if code:
            last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-REASON_LINES:]
            return result | {"status": "failed", "reason": f"exit code {code}; {log}:\n" + "\n".join(last)}
        files = sorted(str(file) for pattern in self.figures for file in out.glob(pattern))
        return result | {"values": self.values(out), "files": files}


def run_to_end(command: Command, output: IO[str], limit_s: float) -> int | None:
    """Run a program with all its output in a file; return its exit code, None where it was ended at the limit."""
    environment = {**os.environ, "PYTHONPATH": f"{REPO / 'scripts'}:{REPO}", "PYTHONUNBUFFERED": "1"}
    child = start_child(command, REPO, environment, output)
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(child)


def end(child: subprocess.Popen) -> None:
    """End a program, with what it started, if it still runs."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
