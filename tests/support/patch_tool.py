"""Run the command line of a project created by a test, and interrupt it."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from support.trees import contents
from verl_precision.errors import Refused

TRAILERS = {"Reason": "local", "Origin": "here", "Forwarded": "no", "Applied-Upstream": "no"}


def message(subject: str, **trailers: str | None) -> str:
    """Return a commit message with a patch's required trailers, except those that are None."""
    lines = [f"{key}: {value}" for key, value in {**TRAILERS, **trailers}.items() if value is not None]
    return "\n".join([subject, "", "It exists for the tests and dies with them.", "", *lines])


def run_command(
    project: Path, *args: object, before: tuple = (), python: str | Path = sys.executable, **options
) -> subprocess.CompletedProcess:
    """Run the project's own command line with only the standard library available."""
    line = [*before, python, "-S", "-B", project / "scripts/verl_precision", *args]
    return subprocess.run([str(word) for word in line], capture_output=True, text=True, **options)


def refused(project: Path, *args: object, unchanged: Path, **options) -> str:
    """Run the tool, which must refuse with exit code 1, in one line, and change nothing; return that line."""
    before = contents(unchanged)
    done = run_command(project, *args, **options)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert done.stderr.startswith(f"verl-precision {args[0]}: ") and done.stderr.count("\n") == 1
    assert contents(unchanged) == before
    return done.stderr


# Root writes into read-only folders unless it gives up its capabilities.
AS_A_USER = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()

# Position of the folder descriptors among the arguments of an event, for paths that are relative to them.
CHANGES = {
    **{"os.rename": (2, 3), "os.remove": (1,), "os.mkdir": (2,), "os.rmdir": (1,), "os.symlink": (2,)},
    **{"os.chmod": (2,), "os.chown": (3,), "shutil.copyfile": ()},
}


def changed_paths(event: str, args: tuple) -> list[Path]:
    """Return the absolute paths that the audit event ``event`` is about to change; empty for other events."""
    if event == "open":
        writing = isinstance(args[0], str | bytes) and isinstance(args[1], str) and {*args[1]} & {*"wx"}
        return [Path(os.fsdecode(args[0])).absolute()] if writing else []
    if event not in CHANGES:
        return []
    folders = [args[each] for each in CHANGES[event]] or [-1, -1]
    named = args[1:2] if event == "os.symlink" else args[:2] if len(folders) == 2 else args[:1]
    return [absolute(each, folder) for each, folder in zip(named, folders, strict=True)]


def absolute(path: str | bytes | Path | int, folder: int) -> Path:
    """Return the absolute path of what is open as ``path``, or of a path relative to an open folder, unless -1."""
    if isinstance(path, int):
        return Path(os.readlink(f"/proc/self/fd/{path}"))
    return Path("." if folder == -1 else os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path)).absolute()


def cut_short(target: Path, run: Callable[[], object], number: int, how: str) -> bool:
    """Run in a child that is killed, gets an error or is interrupted, before change ``number`` in ``target``.

    Returns:
        Whether the child was cut short; False if it makes fewer changes.
    """

    def end() -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt if how == "interrupted" else OSError("the disk is gone")

    code = interposed(target, run, number, lambda paths: end())
    assert code in (0, -signal.SIGKILL if how == "killed" else 1)
    return code != 0


def interposed(
    target: Path,
    run: Callable[[], object],
    number: int,
    act: Callable[[list[Path]], None],
    verdict: Callable[[], bool] = lambda: True,
) -> int:
    """Run in a child that calls ``act`` with the paths of change ``number`` in ``target`` just before it is made.

    Args:
        verdict: called after ``run``, which may raise an expected error.

    Returns:
        The child's exit code: 0 if it makes fewer changes, 1 if it acted, 2 if ``verdict`` then was False.
    """

    def watch(event: str, args: tuple) -> None:
        nonlocal number
        if number >= 0 and (paths := [path for path in changed_paths(event, args) if path.is_relative_to(target)]):
            number -= 1
            if number == -1:
                act(paths)

    child = os.fork()
    if child == 0:
        tempfile.tempdir = str(target.parent)
        sys.addaudithook(watch)
        with contextlib.suppress(OSError, KeyboardInterrupt, Refused):
            run()
        os._exit(0 if number >= 0 else 1 if verdict() else 2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
