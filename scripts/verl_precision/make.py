"""Run a target of the Makefile: ``python3 scripts/verl_precision make TARGET [NAME=VALUE ...]``.

Checks the variables with only the standard library of Python 3.10, sets the target's environment up unless it is up to
date, and starts there the command line that ``verl_precision.spelling`` translates them into.

DEVICE is cpu or cuda (default: cuda where nvidia-smi lists a GPU) and picks the environment; PYTHON names the Python
to make it with. Both may also be set in the environment, as may all variables of run, of submit and of the targets that
take a fixed few.
"""

import ast
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from verl_precision import cli
from verl_precision.commands import setup_env
from verl_precision.doctor.interpreter import find_interpreter
from verl_precision.errors import Refused
from verl_precision.paths import PACKAGE, PROGRAM, REPO, SCRIPTS
from verl_precision.spelling import MADE, PATCHING, TARGETS, MakeTarget, arguments
from verl_precision.words import alternatives, gpu_present, one_of, parse_words

SHARED = "--shared"  # the words are those of several targets
SOURCES = ("TORCH_INDEX_URL", "WHEELHOUSE", "FLASH_ATTN")  # of environments: every target takes them for its set-up
MODULES = (REPO, SCRIPTS, REPO / "tests")  # where the modules are that a target may start


def words(values: Mapping[str, str]) -> list[str]:
    """Return the variables as ``NAME=VALUE`` words."""
    return [f"{name}={value}" for name, value in values.items()]


def own_values(name: str, target: MakeTarget, typed: Mapping[str, str], shared: bool) -> dict[str, str]:
    """Return the variables of a target: those of the command line, and of the environment where it takes these.

    A name that the target does not take is refused, unless the words are ``shared`` by several targets.
    """
    if target.takes is None:  # its command checks the names
        inherited = cli.find_module(name).VARIABLES if name in ("run", "submit") else ()
    else:
        inherited = {*target.takes} - {"FORCE"}  # which is typed each time
        typed = {each: value for each, value in typed.items() if each in (*target.takes, "DEVICE") or not shared}
        parse_words(words(typed), (*target.takes, "DEVICE"))
    return {each: os.environ[each] for each in inherited if each in os.environ} | dict(typed)


def chosen_device(name: str, target: MakeTarget, values: dict[str, str]) -> str:
    """Return the device whose environment the target runs in, and leave DEVICE in ``values`` only for its command."""
    default = "cuda" if gpu_present() and name != "mutants" else "cpu"
    if name == "plan-memory":  # its DEVICE is the planned one
        return default
    given = {each: os.environ[each] for each in ["DEVICE"] if os.environ.get(each)} | values
    device = one_of(given, "DEVICE", ["cpu", "cuda"], default)
    values.pop("DEVICE", None)
    takes = cli.find_module(target.command or name).VARIABLES if target.takes is None else ()
    if "DEVICE" in given and "DEVICE" in takes:
        values["DEVICE"] = device
    return device


def interpreter(name: str, values: Mapping[str, str], device: str, python: str | None, typed: bool = False) -> str:
    """Return the Python to run a target in, and set its environment up unless it is up to date.

    The doctor runs in the Python of VERL, or in PYTHON; if that was ``typed``, as a word of make, only there.
    """
    if name == "doctor":
        verl = Path(values["VERL"]) if "VERL" in values else None
        if verl and not verl.is_dir():
            raise Refused(f"VERL={verl} is not a folder; give a checkout of verl, an unpacked release or site-packages")
        instead = "leave PYTHON out" if typed else ""
        environment = setup_env.ENVIRONMENTS[device]
        if verl and not typed and not environment.ready:
            instead = f"set {environment.folder} up ({environment.cost}): make setup"
        if found := find_interpreter(verl, python, instead):
            return found
        # PYTHON is the Python to run in, not one to make .venv with
        advice = "the doctor also runs in PYTHON= with hydra-core and omegaconf, and torch if that verl is patched"
        return str(setup_env.setup(device, None, advice, patch=verl is None))  # another verl is examined
    if name == "mutants":
        setup_env.setup("workers", python)
    return str(setup_env.setup(device, python))


def installed(name: str, device: str) -> str:
    """Return the site-packages folder of this checkout's environment, on which a target acts without VERL."""
    folder = setup_env.ENVIRONMENTS[device].path / "site-packages"
    if not folder.is_dir():
        example = f"make {name} VERL=/path/to/verl"
        raise Refused(f"VERL: is not set, and this checkout has no {folder.parent.name}; example: {example}")
    print(f"VERL is not set: taking {folder}", flush=True)
    return str(folder)


def show_help(name: str, target: MakeTarget) -> NoReturn:
    """Print the help of a target and of the command that it starts, or what the module is for that it starts."""
    takes = ["NAME=VALUE …"] if target.takes is None else [f"{each}=…" for each in target.takes]
    print("usage: make", name, *takes)
    if target.takes is None:
        print("  NAME=VALUE stands for --name VALUE")
    elif takes:  # the command takes some as arguments, and a flag for yes
        print("  a variable stands for the option or argument of its name, VERL and OAT for TREE, FROM for RELEASE,")
        print("  ARGS for the words of the command line")
    command = target.command or name
    if name == "bench-amp":  # its --help needs torch
        command = "verl_precision.commands.bench_amp"
    if "." not in command:
        print(flush=True)
        os.execv(sys.executable, [*PROGRAM, command, "--help"])
    files = [folder / f"{command.replace('.', '/')}.py" for folder in MODULES]
    print(*("\n" + ast.get_docstring(ast.parse(file.read_text())) for file in files if file.exists()))
    sys.exit(0)


def start(name: str, typed: list[str]) -> None:
    """Parse the words, set the environment up, and replace this process by the command."""
    target = TARGETS[name]
    if not {"--help", "-h"}.isdisjoint(typed):
        show_help(name, target)
    values = dict(word.partition("=")[::2] for word in typed if word != SHARED)
    typed_python = bool(values.get("PYTHON"))
    python = values.pop("PYTHON", os.environ.get("PYTHON"))
    sources = {each: values.pop(each) for each in SOURCES if each in values}
    one_of({each: value for each, value in sources.items() if value}, "FLASH_ATTN", ["yes", "no"], "yes")
    values = own_values(name, target, values, SHARED in typed)
    device = chosen_device(name, target, values)
    if name in (*PATCHING, "pr-branch") and not {"VERL", "OAT"} & set(values):
        values["VERL"] = installed(name, device)
    if name == "sanity":
        lines = (REPO / "configs/compare/sanity.words").read_text().splitlines()
        values = dict(line.partition("=")[::2] for line in lines if line and not line.startswith("#")) | values
    program = command_line(name, target, values)
    os.environ.update(sources)
    python = interpreter(name, values, device, python, typed_python) if target.environment else sys.executable
    if name != "setup":
        os.environ[MADE] = name
        os.execv(python, [python, *program])


def command_line(name: str, target: MakeTarget, values: Mapping[str, str]) -> list[str]:
    """Return the arguments of Python that start what a target stands for, if its command accepts the values."""
    command = target.command or name
    if "." in command:
        folders = [*map(str, MODULES), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        own = ["--out", f"data/{name}"] if command.startswith("recipes.") else filter(None, [values.get("ONLY")])
        return ["-m", command, *own]
    if target.takes is None:
        cli.find_module(command).parse(words(values))
    options = arguments(name if name in PATCHING else command, values)
    if name in ("doctor", "bench", "pr-branch"):
        cli.find_module(name).parse(options[1:])
    return [str(PACKAGE), *options]


def main(arguments: list[str]) -> int:
    """Run a target. Return the exit code, if it does not replace this process."""
    os.environ[MADE] = "help"  # until the target is known
    name, *typed = arguments or ["--help"]
    os.environ.pop("PYTHONSAFEPATH", None)  # of the command, which imports from its own folder
    if name in ("-h", "--help"):
        print(f"{__doc__}\nTargets: {', '.join(TARGETS)}")
        return 0
    with cli.handled_errors(name):
        if name not in TARGETS:
            raise Refused(f"is not a target with variables; {alternatives(name, TARGETS, 'targets that have some')}")
        start(name, typed)
    return 0
