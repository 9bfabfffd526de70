"""``--help`` of every command requires only the standard library of Python 3.10, and writes nothing."""

import json
import subprocess
import sys
from pathlib import Path

import command
import compare
import run
import submit
from lib.paths import REPO
from lib.run.job import VARIABLES

WORDS = {  # of commands whose help is their own parser's
    "probe": "PRECISION",
    "preflight": "LENGTH",
    "plan-memory": "EXPERIMENT",
    "bench": "--sizes",
    "mutants": "ONLY",
}
REQUESTS = [
    *([name, "--help"] for name in command.COMMANDS),
    *([name, *words] for name in ("run", "submit", "compare") for words in (["-h"], ["PRECISION=bf16", "--help"])),
]
# Executes each request in this process, where the command would replace the process by its script.
PROGRAM = """
import contextlib, io, json, os, runpy, sys
sys.modules["tomllib"] = None  # Python 3.10 does not have it
sys.path.insert(0, sys.argv[1])
import command

def execv(program, arguments):
    sys.argv = arguments[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()

os.execv = execv
texts = []
for request in json.loads(sys.argv[2]):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            command.main(request)
        except SystemExit as end:
            assert not end.code, (request, end.code)
    texts.append(text.getvalue())
json.dump(texts, sys.stdout)
"""


def changes(folder: Path) -> dict[Path, int]:
    """Return the time of the last change of every file below ``folder``, except compiled Python."""
    files = (file for file in folder.rglob("*") if "__pycache__" not in file.parts)
    return {file: file.stat().st_mtime_ns for file in files if file.is_file()}


def test_help_of_every_command_is_a_text_about_it(tmp_path):
    before = {name: changes(REPO / name) for name in ("scripts", "configs", "docs")}
    line = [sys.executable, "-S", "-B", "-c", PROGRAM, REPO / "scripts", json.dumps(REQUESTS)]
    done = subprocess.run(line, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == [] and {name: changes(REPO / name) for name in before} == before
    texts = dict(zip(map(" ".join, REQUESTS), json.loads(done.stdout), strict=True))
    for words, text in texts.items():
        assert len(text) > 50 and WORDS.get(words.split()[0], "") in text, words
    for module, variables in ((run, VARIABLES), (submit, VARIABLES), (compare, compare.VARIABLES)):
        for words in ("--help", "-h", "PRECISION=bf16 --help"):
            text = texts[f"{module.__name__} {words}"]
            assert text.startswith(module.__doc__) and "sanity_cpu" in text
            assert all(f"\n  {name} " in text for name in variables)


def test_help_replaces_the_process_by_the_script():
    line = [sys.executable, "-S", "-B", REPO / "scripts/command.py", "report", "--help"]
    done = subprocess.run(line, env={}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "FROM" in done.stdout
