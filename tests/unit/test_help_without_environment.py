"""``--help`` of the measuring commands needs the standard library only, and writes nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from lib.paths import REPO

WORDS = {  # of each command's help
    "probe": "PRECISION",
    "preflight": "LENGTH",
    "plan_memory": "EXPERIMENT",
    "bench": "--sizes",
    "mutants": "NAME",
}
RUN = """
import runpy, sys
sys.modules["tomllib"] = None  # Python 3.10 does not have it
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def contents(folder: Path) -> dict[Path, int]:
    """Return the time of the last change of every file below ``folder``, except compiled Python."""
    files = (file for file in folder.rglob("*") if "__pycache__" not in file.parts)
    return {file: file.stat().st_mtime_ns for file in files if file.is_file()}


@pytest.mark.parametrize("name", WORDS)
def test_help_imports_the_standard_library_of_python_3_10_and_writes_nothing(name, tmp_path):
    before = {folder: contents(REPO / folder) for folder in ("scripts", "configs", "docs")}
    command = [sys.executable, "-S", "-B", "-c", RUN, REPO / "scripts" / f"{name}.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert WORDS[name] in done.stdout and done.stderr == "" and list(tmp_path.iterdir()) == []
    assert {folder: contents(REPO / folder) for folder in before} == before
