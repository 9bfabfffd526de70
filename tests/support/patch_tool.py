"""Run scripts/patchset.py of a project created by a test, and interrupt it."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from support.trees import contents

TRAILERS = {"Reason": "local", "Origin": "here", "Forwarded": "no", "Applied-Upstream": "no"}


def message(subject: str, **trailers: str | None) -> str:
    """Return a commit message with a patch's required trailers, except those that are None."""
    lines = [f"{key}: {value}" for key, value in {**TRAILERS, **trailers}.items() if value is not None]
    return "\n".join([subject, "", "It exists for the tests and dies with them.", "", *lines])


def patchset(
    project: Path, *args: object, before: tuple = (), python: str | Path = sys.executable, **options
) -> subprocess.CompletedProcess:
    """Run the project's own tool with only the standard library available."""
    line = [*before, python, "-S", "-B", project / "scripts/patchset.py", *args]
    return subprocess.run([str(word) for word in line], capture_output=True, text=True, **options)


def refused(project: Path, *args: object, unchanged: Path, **options) -> str:
    """Run the tool, which must refuse with exit code 1, in one line, and change nothing; return that line."""
    before = contents(unchanged)
    done = patchset(project, *args, **options)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert done.stderr.startswith("patchset: ") and done.stderr.count("\n") == 1
    assert contents(unchanged) == before
    return done.stderr


# Root writes into read-only folders unless it gives up its capabilities.
AS_A_USER = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.copyfile")


def cut_short(target: Path, run: Callable[[], object], number: int, how: str) -> bool:
    """Run in a child that is killed, gets an error or is interrupted, before change ``number`` in ``target``.

    Returns:
        Whether the child was cut short; False if it makes fewer changes.
    """

    def watch(event: str, args: tuple) -> None:
        nonlocal number
        writing = event == "open" and isinstance(args[1], str) and "w" in args[1]
        relative = event in ("os.remove", "os.rmdir") and args[1] != -1  # to a folder, as rmtree does
        inside = os.readlink(f"/proc/self/fd/{args[1]}") if relative else str(args)
        if (event in CHANGES or writing) and str(target) in inside:
            number -= 1
            if number == -1:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyboardInterrupt if how == "interrupted" else OSError("the disk is gone")

    child = os.fork()
    if child == 0:
        tempfile.tempdir = str(target.parent)
        sys.addaudithook(watch)
        with contextlib.suppress(OSError, KeyboardInterrupt):
            run()
        os._exit(1 if number < 0 else 0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL if how == "killed" else 1)
    return code != 0
