"""Resolve requirements/*.in into *.lock with uv, once for Python 3.11 and 3.12: pins that are still valid stay.

Exit code 1: Python 3.12 would take other versions, which are listed. Bound them in the .in file, so that one lock
serves both.
"""

import difflib
import os
import shutil
import sys

from verl_precision.paths import CACHE, REPO
from verl_precision.uv import find_uv
from verl_precision.words import Parser


def main(words: list[str]) -> int:
    Parser("verl-precision lock", __doc__).parse_args(words)
    os.environ["UV_CUSTOM_COMPILE_COMMAND"] = "make lock"
    uv, folder = find_uv(), REPO / "requirements"
    for name in ("cpu", "cuda", "workers"):
        options = ["--python-platform", "linux", "--no-emit-index-url", "--no-annotate"]
        options += ["--override", f"{name}.overrides"] if (folder / f"{name}.overrides").exists() else []
        lock, other = folder / f"{name}.lock", CACHE / f"{name}.lock"
        uv.pip("compile", f"{name}.in", "-o", lock, "--python-version", "3.11", *options, cwd=folder)
        shutil.copy(lock, other)  # uv prefers the pins that are there
        uv.pip("compile", f"{name}.in", "-o", other, "--python-version", "3.12", *options, cwd=folder)
        pins = [path.read_text().splitlines() for path in (lock, other)]
        if lines := list(difflib.unified_diff(*pins, "3.11", "3.12", n=0, lineterm="")):
            hint = f"{name}.in: Python 3.12 takes other versions (+); bound them so that one lock serves both"
            print(*lines, hint, sep="\n", file=sys.stderr)
            return 1
    return 0
