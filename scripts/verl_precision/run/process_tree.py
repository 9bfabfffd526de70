"""Measure and end ``main_ppo`` and every process that it starts, whatever session Ray and vLLM put them in."""

import contextlib
import re
import subprocess
from pathlib import Path

import psutil

GRACE_S = 15
SHARED_MEMORY = Path("/dev/shm")


class ProcessTree:
    """``main_ppo`` and its descendants, also those whose parent has ended.

    Args:
        earlier: the files of shared memory that existed before ``root``.

    Attributes:
        peak_gib: the greatest sum of the proportional set sizes (PSS) of all processes so far.
        shared: files of shared memory that the run created; vLLM and verl leave them behind.
    """

    def __init__(self, root: subprocess.Popen, earlier: set[Path]):
        self.root = psutil.Process(root.pid)
        self.known = {self.root}
        self.peak_gib = 0.0
        self.earlier, self.shared = earlier, set()

    def alive(self) -> set[psutil.Process]:
        """Return all known processes and their children that run. A process whose parent has ended stays known."""
        for process in list(self.known):
            try:
                self.known |= set(process.children(recursive=True))
            except psutil.NoSuchProcess:
                self.known.discard(process)
        return set(self.known)

    def find_shared(self) -> None:
        """Add to ``shared`` the new files of shared memory that a process of this run maps; others' stay."""
        if new := set(SHARED_MEMORY.glob("*")) - self.earlier - self.shared:
            for process in self.alive():
                with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                    maps = Path(f"/proc/{process.pid}/maps").read_text()
                    self.shared |= new & {Path(mapped) for mapped in re.findall(rf"{SHARED_MEMORY}/\S+$", maps, re.M)}

    def measure(self) -> None:
        """Update ``peak_gib`` and ``shared``."""
        self.find_shared()
        size = 0
        for process in self.alive():
            # it has ended, or runs as another user
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                size += process.memory_full_info().pss
        self.peak_gib = max(self.peak_gib, size / 2**30)

    def end(self) -> None:
        """Terminate ``main_ppo``, which takes Ray down, then kill what is left and remove its shared memory."""
        self.find_shared()
        if self.root in self.alive():
            self.root.terminate()
            psutil.wait_procs([self.root], timeout=GRACE_S)
        left = self.alive()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=GRACE_S)
        for file in self.shared:
            file.unlink(missing_ok=True)
