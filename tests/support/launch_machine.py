"""A machine whose programs are stubs, on which tests run the scripts of ``scripts/launch``."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from support.waiting import TIMEOUT_S
from verl_precision.cli import parse
from verl_precision.paths import REPO
from verl_precision.run.job import Job

LAUNCH = REPO / "scripts/launch"
SECRET = "hf_this-is-a-secret"
OVERRIDES = ("data.train_batch_size=64", "+note='it costs $5, or \u20ac 5\U0001f600'", "trainer.logger=[console,file]")
IMAGE = {"IMAGE": "registry/verl-precision:0.9.1"}
ALL_BUT_THE_JOB = f'[[ $1 == */verl_precision ]] || exec {sys.executable} "$@"'  # the body of a python3
# In the folder of the stub's machine, the arguments and the environment as words that end with NUL.
RECORD = """#!/bin/bash
for word in "$@"; do printf '%s\\0' "$word"; done > {path}.words
env -0 > {path}.environment
"""


class Machine:
    """A folder of stubs on PATH. Each records its arguments and environment and runs its body."""

    def __init__(self, folder: Path):
        self.folder, self.bin, self.home = folder, folder / "bin", folder / "home"
        self.bin.mkdir()
        self.home.mkdir()

    def program(self, name: str, body: str = "") -> Path:
        file = self.bin / name
        file.write_text(f"{RECORD.format(path=self.folder / name)}{body}\n")
        file.chmod(0o755)
        return file

    def called(self, name: str) -> bool:
        return (self.folder / f"{name}.words").exists()

    def recorded(self, name: str) -> list[str]:
        return (self.folder / name).read_text().split("\0")[:-1]

    def words(self, name: str) -> list[str]:
        return self.recorded(f"{name}.words")

    def environment(self, name: str) -> dict[str, str]:
        return dict(variable.split("=", 1) for variable in self.recorded(f"{name}.environment"))

    def start(self, script: str | Path, *arguments: str, **knobs: object) -> subprocess.Popen:
        """Start a launch script, or another program by its path."""
        environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.home), "PYTHON": sys.executable}
        environment |= {name: str(value) for name, value in knobs.items()}
        return subprocess.Popen(
            [LAUNCH / script, *arguments],
            cwd=self.home,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str | Path, *arguments: str, **knobs: object) -> subprocess.CompletedProcess:
        process = self.start(script, *arguments, **knobs)
        out, err = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def succeed(self, script: str | Path, *arguments: str, **knobs: object) -> subprocess.CompletedProcess:
        done = self.run(script, *arguments, **knobs)
        assert done.returncode == 0, done.stderr
        return done


def knobs_and_arguments(words: str) -> tuple[dict[str, str], list[str]]:
    """Split the words of a command line into knobs, ``NAME=VALUE``, and the script's arguments."""
    knobs, arguments = {}, []
    for word in shlex.split(words):
        if re.match("[A-Z_]+=", word):
            name, _, knobs[name] = word.partition("=")
        else:
            arguments.append(word)
    return knobs, arguments


def job_of(command: list[str]) -> Job:
    """Return the job that ``…/scripts/verl_precision run --name=VALUE …`` starts."""
    assert command[0].endswith("scripts/verl_precision") and command[1] == "run"
    return parse("run", [*command[2:], "--device=cpu"])[0]
