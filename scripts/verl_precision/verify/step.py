"""Define a step of the verification, a program that leaves files, and run it."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from verl_precision.facts.gpus import find_gpus
from verl_precision.facts.packages import missing_packages
from verl_precision.paths import REPO, SCRIPTS
from verl_precision.process import start_child
from verl_precision.run.presets import oldest

Command = list[str | Path]
GRACE_S = 60.0  # for a program to end its children after SIGTERM: the command run ends Ray in half of it
REASON_LINES, KEPT_LINES = 6, 300  # of a failed program's log: in the report, and beside it
# No step needs a network, and none joins a cluster.
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1")
UNSET = ("RAY_ADDRESS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # vLLM's sleep allows no expandable segments


@dataclass(frozen=True)
class VerifiedDevice:
    """What is verified: a ``device``, "cuda" or "cpu", and the folder ``work`` of the steps' files and logs.

    On a CPU every step is as small as it can be: it tests the step, not the device.
    """

    device: str
    work: Path

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    @property
    def bf16(self) -> bool:
        """Return whether the device computes in bfloat16 without emulation."""
        return self.small or oldest(find_gpus()).bf16


@dataclass(frozen=True)
class Step:
    """One or more programs, run in turn.

    Attributes:
        stage: what it belongs to.
        needs: the modules that it imports; it is skipped where one of them is not installed.
        commands: returns their command lines, from the target and the folder for what they write.
        values: returns the values for the report, read from that folder, as JSON types.
        bf16: whether it computes in bfloat16; it is skipped on a GPU that emulates it.
        limit_s: the time after which a program has failed, on a GPU; on a CPU ten times as long.
    """

    stage: str
    name: str
    needs: tuple[str, ...]
    commands: Callable[[VerifiedDevice, Path], list[Command]]
    values: Callable[[Path], dict[str, Any]]
    bf16: bool = False
    limit_s: float = 600.0

    def why_skipped(self, target: VerifiedDevice) -> str:
        """Return why the step cannot run here; empty if it can."""
        if missing := missing_packages(self.needs):
            return f"not installed: {', '.join(missing)}"
        return "this GPU has no bf16" if self.bf16 and not target.bf16 else ""

    def run(self, target: VerifiedDevice) -> dict[str, Any]:
        """Run the programs and return their result.

        Returns:
            ``status``: passed, failed or skipped; ``seconds``; ``reason`` unless it passed; ``values`` as far as there
            are any; ``files``: the paths of the figures in its folder, and of the end of the log if it failed.
        """
        if why := self.why_skipped(target):
            return {"status": "skipped", "reason": why}
        out = target.work / "verify-gpu" / self.name
        if out.exists():
            shutil.rmtree(out)
        out.mkdir(parents=True)
        log = out.with_suffix(".log")
        limit_s = self.limit_s * (10 if target.small else 1)
        begin = time.monotonic()
        result: dict[str, Any] = {}
        reason = ""
        try:  # whatever goes wrong in one step, the others run
            with log.open("w") as output:
                codes = (run_to_end(command, output, limit_s) for command in self.commands(target, out))
                code = next((code for code in codes if code != 0), 0)
            reason = f"did not end within {limit_s:g} s" if code is None else f"exit code {code}" if code else ""
            result["values"] = self.values(out)
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {error}"
        result = {"status": "failed" if reason else "passed", "seconds": round(time.monotonic() - begin, 1)} | result
        files = list(out.glob("*.png"))
        if reason:
            lines = log.read_text(errors="replace").splitlines()
            last = [line for line in lines if line.strip()][-REASON_LINES:]
            result["reason"] = "\n".join([f"{reason}; {log.name}", *last])
            end_of_log = out / f"{self.name}.log"
            end_of_log.write_text("\n".join(lines[-KEPT_LINES:]).replace(str(REPO), ".") + "\n")
            files.append(end_of_log)
        return result | {"files": sorted(map(str, files))}


def run_to_end(command: Command, output: IO[str], limit_s: float) -> int | None:
    """Run a program with all its output in a file; return its exit code, None where it was ended at the limit."""
    environment = {name: value for name, value in os.environ.items() if name not in UNSET} | OFFLINE
    path = [str(SCRIPTS), str(REPO), os.environ.get("PYTHONPATH")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
    child = start_child(command, REPO, environment, output)
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(child)


def end(child: subprocess.Popen) -> None:
    """End a program if it still runs, and what it leaves in its session."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
