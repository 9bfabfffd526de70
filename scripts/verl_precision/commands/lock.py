"""Resolve requirements/*.in into *.lock with uv, once for Python 3.11 and 3.12: pins that are still valid stay.

Exit code 1: Python 3.12 would take other versions, which are listed. Bound them in the .in file, so that one lock
serves both.
"""

import difflib
import os
import sys
from pathlib import Path

from verl_precision.parser import Parser
from verl_precision.paths import CACHE, REPO
from verl_precision.uv import Uv, find_uv

SETS = ("cpu", "cuda", "workers")


def resolve(uv: Uv, name: str, python: str, lock: Path) -> None:
    """Resolve ``name``.in into ``lock``, whose present pins are preferred."""
    words = ["compile", f"{name}.in", "--output-file", lock, "--python-version", python]
    words += ["--python-platform", "linux", "--no-emit-index-url", "--no-annotate"]
    if (REPO / f"requirements/{name}.overrides").exists():
        words += ["--override", f"{name}.overrides"]
    uv.pip(*words, cwd=REPO / "requirements")


def main(words: list[str]) -> int:
    Parser("verl-precision lock", __doc__).parse_args(words)
    os.environ["UV_CUSTOM_COMPILE_COMMAND"] = "make lock"
    uv = find_uv()
    for name in SETS:
        lock, other = REPO / f"requirements/{name}.lock", CACHE / f"{name}.lock"
        resolve(uv, name, "3.11", lock)
        other.write_text(lock.read_text())
        resolve(uv, name, "3.12", other)
        pins = [path.read_text().splitlines() for path in (lock, other)]
        if lines := list(difflib.unified_diff(*pins, "3.11", "3.12", n=0, lineterm="")):
            print(*lines, sep="\n", file=sys.stderr)
            print(
                f"{name}.in: Python 3.12 takes other versions (+); bound them so that one lock serves both",
                file=sys.stderr,
            )
            return 1
    return 0
