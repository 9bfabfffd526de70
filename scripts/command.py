"""Run a command of the project in its environment: ``scripts/command.py COMMAND [NAME=VALUE ...]``, as ``make`` does.

Checks the words with the standard library of Python 3.10 alone, sets the command's environment up unless it is up to
date, and runs the command in it. ``COMMAND --help`` prints the help of the command and changes nothing.

DEVICE is cpu or cuda (default: cuda where nvidia-smi lists a GPU) and picks the environment; PYTHON names the Python
to make it with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lib.cli import one_of, shell_words
from lib.errors import Refused
from lib.paths import REPO
from lib.run.job import VARIABLES

SITE = ".venv/site-packages"


@dataclass(frozen=True)
class Command:
    """A command of the Makefile.

    Attributes:
        script: a file of scripts/, or a module of recipes/ to run.
        arguments: returns the script's own arguments for the variables that are set on the command line.
        takes: the variables that it takes; None: the script checks them itself.
        environment: whether it runs in .venv or .venv-cuda.
    """

    script: str
    arguments: Callable[[Mapping[str, str]], list[str]]
    takes: tuple[str, ...] | None = None
    environment: bool = True


def words(values: Mapping[str, str]) -> list[str]:
    """Return the variables as ``NAME=VALUE`` words."""
    return [f"{name}={value}" for name, value in values.items()]


def run_words(values: Mapping[str, str]) -> list[str]:
    """Return the words of ``make run``, whose variables may also be set in the environment."""
    return words({name: os.environ[name] for name in VARIABLES if name in os.environ} | dict(values))


def sanity_words(values: Mapping[str, str]) -> list[str]:
    """Return the words of the sanity test's grid; those of the command line win."""
    lines = (REPO / "configs/compare/sanity.words").read_text().splitlines()
    grid = dict(line.partition("=")[::2] for line in lines if line and not line.startswith("#"))
    return words(grid | dict(values))


def args_words(values: Mapping[str, str]) -> list[str]:
    """Return ARGS as a shell splits it."""
    return shell_words("ARGS", values.get("ARGS", ""))


def target(values: Mapping[str, str]) -> list[str]:
    """Return the arguments by which patchset.py finds the tree that VERL or OAT names; the verl of .venv by default.

    Raises:
        Refused: both are set, or one is empty.
    """
    if "VERL" in values and "OAT" in values:
        raise Refused(f"VERL={values['VERL']} OAT={values['OAT']}: give one of the two")
    name = "OAT" if "OAT" in values else "VERL"
    folder = values.get(name, SITE)
    if not folder:
        raise Refused(f"{name}= is empty: it must be a folder that contains {name.lower()}/")
    return ["--framework", name.lower(), folder]


def port(values: Mapping[str, str]) -> list[str]:
    for name in ("FROM", "TO"):
        if not values.get(name):
            raise Refused(f"{name}: is not set: make port FROM=0.9.1 TO=0.9.2")
    framework = one_of(values, "FRAMEWORK", ["verl", "oat"], "verl")
    folder = values.get("DIR") or f"outputs/{framework}-{Path(values['TO']).name}"
    return ["port", "--framework", framework, values["FROM"], values["TO"], folder]


def doctor(values: Mapping[str, str]) -> list[str]:
    verl = ["--verl", values["VERL"]] if "VERL" in values else []
    return [*verl, f"--args={values.get('ARGS', '')}"]


def pr_branch(values: Mapping[str, str]) -> list[str]:
    return [values.get("VERL", SITE), "--dir", values.get("DIR", "outputs/pr-branch")]


def fixed(*arguments: str) -> Callable[[Mapping[str, str]], list[str]]:
    return lambda values: list(arguments)


def patchset(action: str) -> Command:
    return Command("patchset.py", lambda values: [action, *target(values)], ("VERL", "OAT"), environment=False)


COMMANDS = {
    "run": Command("run.py", run_words),
    "submit": Command("submit.py", run_words),
    "preflight": Command("preflight.py", words),
    "probe": Command("probe.py", words),
    "compare": Command("compare.py", words),
    "sanity": Command("compare.py", sanity_words),
    "report": Command("report.py", words),
    "plan-memory": Command("plan_memory.py", words),
    "doctor": Command("doctor.py", doctor, ("ARGS", "VERL")),
    "bench": Command("bench.py", args_words, ("ARGS",)),
    "bench-amp": Command("bench_amp.py", args_words, ("ARGS",)),
    "mutants": Command("mutants.py", lambda values: list(filter(None, [values.get("ONLY")])), ("ONLY",)),
    "pr-branch": Command("pr_branch.py", pr_branch, ("VERL", "DIR")),
    "gsm8k": Command("recipes.gsm8k.prepare", fixed("--out", "data/gsm8k"), ()),
    "dapo-math": Command("recipes.dapo_math.prepare", fixed("--out", "data/dapo-math"), ()),
    "sanity-math": Command("recipes.sanity_math.prepare", fixed("--out", "data/sanity-math"), ()),
    "apply-patches": patchset("apply"),
    "unapply-patches": patchset("unapply"),
    "status": patchset("status"),
    "drift": patchset("drift"),
    "port": Command("patchset.py", port, ("FROM", "TO", "DIR", "FRAMEWORK"), environment=False),
    "check": Command("patchset.py", fixed("check", "--all"), (), environment=False),
    "matrix": Command("matrix.py", fixed(), (), environment=False),
}


def main(arguments: list[str]) -> None:
    """Check the words, set up the environment and replace this process by the command.

    Raises:
        Refused: a word is not among those that the command takes, or its value is not allowed.
    """
    name, *given = arguments or ["--help"]
    if name not in COMMANDS:
        if name in ("-h", "--help"):
            print(f"{__doc__}\nCommands: {', '.join(COMMANDS)}")
            return
        raise Refused(f"{name}: is not a command; they are {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    values = dict(word.partition("=")[::2] for word in given)
    python, device = values.pop("PYTHON", None), values.get("DEVICE")
    device = one_of(values, "DEVICE", ["cpu", "cuda"], "cuda" if gpu_present() else "cpu")
