"""Run a command of the project in its environment: ``scripts/command.py COMMAND [NAME=VALUE ...]``, as ``make`` does.

Checks the words with the standard library of Python 3.10 alone, sets the command's environment up unless it is up to
date, and runs the command in it. ``COMMAND --help`` prints the help of the command and changes nothing.

DEVICE is cpu or cuda (default: cuda where nvidia-smi lists a GPU) and picks the environment; PYTHON names the Python
to make it with. Both may also be set in the environment, as may all variables of run, of submit and of the commands
that take a fixed few.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out
os.environ.pop("PYTHONSAFEPATH", None)  # of the command, which imports from its own folder

import setup_env
from verl_precision.cli import (
    alternatives,
    gpu_present,
    handled_errors,
    help_requested,
    one_of,
    parse_words,
    shell_words,
    usage,
)
from verl_precision.doctor.interpreter import find_interpreter
from verl_precision.errors import Refused
from verl_precision.paths import REPO
from verl_precision.run.job import VARIABLES

SHARED = "--shared"  # the words are those of several commands
SOURCES = ("TORCH_INDEX_URL", "WHEELHOUSE", "FLASH_ATTN")  # of environments: every command takes them for setup_env
DOCTOR_NEEDS = "an environment with hydra-core and omegaconf, and torch if that verl is patched"


@dataclass(frozen=True)
class Command:
    """A command of the Makefile.

    Attributes:
        script: a file of scripts/, or a module of recipes/ to run.
        arguments: returns the script's own arguments for the variables that are set on the command line.
        parser: ``MODULE:FUNCTION`` that parses the arguments with the standard library alone; empty where there is
            nothing to parse, or the command's own parser needs the environment.
        takes: the variables that it takes, from the environment too; None: ``parser`` checks their names.
        device: whether DEVICE is also one of the script's own words.
        environment: whether it runs in .venv or .venv-cuda.
        tests: whether it runs this project's tests: in .venv on any machine, some in .venv-workers.
    """

    script: str
    arguments: Callable[[Mapping[str, str]], list[str]]
    parser: str = ""
    takes: tuple[str, ...] | None = None
    device: bool = False
    environment: bool = True
    tests: bool = False

    @property
    def file(self) -> Path:
        """Return the path of ``script``."""
        if self.script.endswith(".py"):
            return REPO / "scripts" / self.script
        return REPO / f"{self.script.replace('.', '/')}.py"


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
    """Return the arguments by which patchset.py finds the tree that VERL or OAT names.

    Raises:
        Refused: both are set, or one is empty.
    """
    if "VERL" in values and "OAT" in values:
        raise Refused(f"VERL={values['VERL']} OAT={values['OAT']}: set only one of the two")
    name = "OAT" if "OAT" in values else "VERL"
    if not values[name]:
        raise Refused(f"{name}= is empty: it must be a folder that contains {name.lower()}/")
    return ["--framework", name.lower(), values[name]]


def apply(values: Mapping[str, str]) -> list[str]:
    fixes = one_of(values, "FIXES", ["yes", "no"], "no") == "yes"
    if fixes and "OAT" in values:
        raise Refused("FIXES=yes: OAT has one series of patches; leave FIXES out")
    return ["apply", *(["--fixes"] if fixes else []), *target(values)]


def unapply(values: Mapping[str, str]) -> list[str]:
    force = one_of(values, "FORCE", ["yes", "no"], "no") == "yes"
    return ["unapply", *(["--force"] if force else []), *target(values)]


def port(values: Mapping[str, str]) -> list[str]:
    for name in ("FROM", "TO"):
        if not values.get(name):
            raise Refused(f"{name}: is not set; example: make port FROM=0.9.1 TO=0.9.2")
    framework = one_of(values, "FRAMEWORK", ["verl", "oat"], "verl")
    folder = values.get("DIR") or f"outputs/{framework}-{Path(values['TO']).name}"
    return ["port", "--framework", framework, values["FROM"], values["TO"], folder]


def carry(values: Mapping[str, str]) -> list[str]:
    for name in ("PATCH", "FROM"):
        if not values.get(name):
            example = "make carry PATCH=fsdp-compute-in-the-configured-dtype FROM=0.9.1"
            raise Refused(f"{name}: is not set; example: {example}")
    framework = one_of(values, "FRAMEWORK", ["verl", "oat"], "verl")
    folder = values.get("DIR") or f"outputs/carry-{values['PATCH'].removesuffix('.patch')}"
    return ["carry", "--framework", framework, values["PATCH"], values["FROM"], folder]


def doctor(values: Mapping[str, str]) -> list[str]:
    verl = ["--verl", values["VERL"]] if "VERL" in values else []
    return [*verl, f"--args={values.get('ARGS', '')}"]


def pr_branch(values: Mapping[str, str]) -> list[str]:
    return [values["VERL"], "--dir", values.get("DIR", "outputs/pr-branch")]


def mutant_words(values: Mapping[str, str]) -> list[str]:
    return [values["ONLY"]] if values.get("ONLY") else []


def fixed(*arguments: str) -> Callable[[Mapping[str, str]], list[str]]:
    return lambda values: list(arguments)


def patchset(action: str) -> Command:
    """Return the command that takes ``action`` on the tree that VERL or OAT names."""
    arguments = lambda values: [action, *target(values)]
    return Command("patchset.py", arguments, takes=("VERL", "OAT"), environment=False)


PATCH_VARIABLES = {
    "VERL": "folder that contains verl/: a git checkout, an unpacked release or site-packages; default: that of .venv",
    "OAT": "folder that contains oat/, instead of VERL",
    "FIXES": "yes also corrects upstream's defects in any dtype: docs/how-to/patch.md; default no",
    "FORCE": "yes renames files that were edited since apply to FILE.edited, instead of refusing; default no",
    "FROM": "release whose patches are taken, such as 0.9.1",
    "TO": "release on PyPI, or a folder that contains the framework",
    "DIR": "folder of the result; default in outputs",
    "FRAMEWORK": "verl or oat; default verl",
    "PATCH": "name of the patch",
}
COMMANDS = {
    "run": Command("run.py", run_words, "verl_precision.run.job:parse_job", device=True),
    "submit": Command("submit.py", run_words, "verl_precision.run.job:parse_job", device=True),
    "preflight": Command("preflight.py", words, "preflight:parse", device=True),
    "probe": Command("probe.py", words, "probe:parse", device=True),
    "recommend": Command("recommend.py", words, "recommend:parse", device=True),
    "compare": Command("compare.py", words, "compare:parse", device=True),
    "sanity": Command("compare.py", sanity_words, "compare:parse", device=True),
    "collapse": Command("collapse.py", words, "collapse:parse", device=True),
    "report": Command("report.py", words, "report:parse"),
    "plan-memory": Command("plan_memory.py", words, "plan_memory:parse"),
    "doctor": Command("doctor.py", doctor, "doctor:parse", ("ARGS", "VERL")),
    "verify-gpu": Command("verify_gpu.py", words, "verify_gpu:parse", device=True),
    "bench": Command("bench.py", args_words, "bench:parse", ("ARGS",)),
    "bench-amp": Command("bench_amp.py", args_words, "", ("ARGS",)),
    "mutants": Command("mutants.py", mutant_words, "mutants:parse", ("ONLY",), tests=True),
    "pr-branch": Command("pr_branch.py", pr_branch, "pr_branch:parse", ("VERL", "DIR")),
    "setup": Command("setup_env.py", fixed(), "", ()),
    "wheelhouse": Command("wheelhouse.py", words, "wheelhouse:parse", device=True, environment=False),
    "gsm8k": Command("recipes.gsm8k.prepare", fixed("--out", "data/gsm8k"), "", ()),
    "dapo-math": Command("recipes.dapo_math.prepare", fixed("--out", "data/dapo-math"), "", ()),
    "sanity-math": Command("recipes.sanity_math.prepare", fixed("--out", "data/sanity-math"), "", ()),
    "apply-patches": Command("patchset.py", apply, "", ("VERL", "OAT", "FIXES"), environment=False),
    "unapply-patches": Command("patchset.py", unapply, "", ("VERL", "OAT", "FORCE"), environment=False),
    "status": patchset("status"),
    "drift": patchset("drift"),
    "port": Command("patchset.py", port, "", ("FROM", "TO", "DIR", "FRAMEWORK"), environment=False),
    "carry": Command("patchset.py", carry, "", ("PATCH", "FROM", "DIR", "FRAMEWORK"), environment=False),
    "check": Command("patchset.py", fixed("check", "--all"), "", (), environment=False),
    "matrix": Command("matrix.py", fixed(), "", (), environment=False),
}


def parse(command: Command, arguments: list[str]) -> None:
    """Have the command parse its arguments, with the standard library alone.

    Raises:
        Refused: a name or a value is not allowed.
    """
    if command.parser:
        module, _, function = command.parser.partition(":")
        getattr(importlib.import_module(module), function)(arguments)


def interpreter(
    name: str, values: Mapping[str, str], device: str, python: str | None, typed: bool = False
) -> str | Path:
    """Return the Python to run a command in, and set its environment up unless it is up to date.

    Args:
        typed: whether ``python`` is of the command line: the doctor then runs in no other that was not named.

    Raises:
        Refused: the doctor cannot run in the Python that the user named, or that of VERL, and .venv is not set up.
    """
    if name == "doctor":
        verl = Path(values["VERL"]) if values.get("VERL") else None
        if "VERL" in values and (verl is None or not verl.is_dir()):
            kinds = "a checkout of verl, an unpacked release or a site-packages folder"
            raise Refused(f"VERL={values['VERL']} is not a folder; give {kinds}")
        instead = "leave PYTHON out" if typed else ""
        environment = setup_env.ENVIRONMENTS[device]
        if verl and not typed and not environment.ready:
            instead = f"set {environment.folder} up ({environment.cost}): make setup"
        if found := find_interpreter(verl, python, instead):
            return found
        # PYTHON is the Python to run in, not one to make .venv with
        advice = f"the doctor also runs in PYTHON= of {DOCTOR_NEEDS}"
        return setup_env.setup(device, None, advice, patch=verl is None)  # another verl is examined
    if COMMANDS[name].tests:
        setup_env.setup("workers", python)
    return setup_env.setup(device, python)


def command_values(command: Command, typed: Mapping[str, str], shared: bool) -> dict[str, str]:
    """Return the variables of a command: those of the command line, and of the environment where it takes a fixed few.

    Args:
        shared: whether ``typed`` are the words of several commands; it takes its own.

    Raises:
        Refused: a name is not among those that the command takes.
    """
    if command.takes is None:
        return dict(typed)
    takes = (*command.takes, "DEVICE")
    typed = {name: value for name, value in typed.items() if name in takes or not shared}
    parse_words(words(typed), takes)
    inherited = set(command.takes) & os.environ.keys() - {"FORCE"}  # which is typed each time
    return {name: os.environ[name] for name in inherited} | typed


def help_command(name: str) -> None:
    """Print the help of a command: the variables that it takes, and what its script prints for ``--help``."""
    command = COMMANDS[name]
    if command.takes is not None:
        variables = [f"{each}=…" for each in command.takes]
        print(" ".join(["usage: make", name, *variables]), flush=True)
    if command.script == "patchset.py" and command.takes:
        print(usage({each: PATCH_VARIABLES[each] for each in command.takes}))
        return
    if command.parser or not command.environment:
        os.execv(sys.executable, [sys.executable, str(command.file), "--help"])
    print(ast.get_docstring(ast.parse(command.file.read_text())))  # its own parser imports packages of the environment


def main(arguments: list[str]) -> None:
    """Parse the words, set the environment up, and replace this process by the command.

    Raises:
        Refused: a word is not among those that the command takes, or its value is not allowed.
    """
    if not arguments or help_requested(arguments[:1]):
        print(f"{__doc__}\nCommands: {', '.join(COMMANDS)}")
        return
    name, *typed = arguments
    if name not in COMMANDS:
        raise Refused(f"is not a command; {alternatives(name, COMMANDS, 'commands')}")
    command = COMMANDS[name]
    if help_requested(typed):
        help_command(name)
        return
    typed_values = dict(word.partition("=")[::2] for word in typed if word != SHARED)
    typed_python = bool(typed_values.get("PYTHON"))
    python = typed_values.pop("PYTHON", os.environ.get("PYTHON"))
    sources = {each: typed_values.pop(each) for each in SOURCES if each in typed_values}
    one_of({name: value for name, value in sources.items() if value}, "FLASH_ATTN", ["yes", "no"], "yes")
    values = command_values(command, typed_values, SHARED in typed)
    default = "cuda" if gpu_present() and not command.tests else "cpu"
    if name == "plan-memory":  # its DEVICE is the planned one
        device = default
    else:
        given = {each: os.environ[each] for each in ["DEVICE"] if os.environ.get(each)} | values
        device = one_of(given, "DEVICE", ["cpu", "cuda"], default)
        values.pop("DEVICE", None)
        if command.device and "DEVICE" in given:
            values["DEVICE"] = device
    if "VERL" in (command.takes or ()) and name != "doctor" and not {"VERL", "OAT"} & set(values):
        installed = setup_env.ENVIRONMENTS[device].path / "site-packages"
        if not installed.is_dir():
            missing = f"is not set, and this checkout has no {installed.parent.name}"
            raise Refused(f"VERL: {missing}; example: make {name} VERL=/path/to/verl")
        print(f"VERL is not set: taking {installed}", flush=True)
        values["VERL"] = str(installed)
    program_arguments = command.arguments(values)
    parse(command, program_arguments)
    os.environ.update(sources)
    program = str(interpreter(name, values, device, python, typed_python) if command.environment else sys.executable)
    if name == "setup":
        return
    if command.script.endswith(".py"):
        target = [str(command.file)]
    else:
        target = ["-m", command.script]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    os.execv(program, [program, *target, *program_arguments])


if __name__ == "__main__":
    with handled_errors(sys.argv[1] if sys.argv[1:] else "command"):
        main(sys.argv[1:])
