"""Run a target of the Makefile: ``python3 scripts/verl_precision make TARGET [NAME=VALUE ...]``.

Checks the variables with only the standard library of Python 3.10, sets the target's environment up unless it is up to
date, and starts there the command line that ``verl_precision.spelling`` translates them into.

DEVICE is cpu or cuda (default: cuda where nvidia-smi lists a GPU) and picks the environment; PYTHON names the Python
to make it with. Both may also be set in the environment, as may all variables of run, of submit and of the targets that
take a fixed few.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from verl_precision import cli
from verl_precision.commands import setup_env
from verl_precision.doctor.interpreter import environment_python
from verl_precision.errors import Refused
from verl_precision.paths import PACKAGE, PROGRAM, REPO, SCRIPTS
from verl_precision.spelling import MADE, PATCHING, TARGETS, arguments
from verl_precision.words import alternatives, gpu_present, one_of, parse_words

SOURCES = ("TORCH_INDEX_URL", "FLASH_ATTN")  # of environments: every target takes them for its set-up
MODULES = (REPO, SCRIPTS, REPO / "tests")  # where the modules are that a target may start


def variables(name: str) -> Iterable[str]:
    """Return the names of a target's own variables."""
    command, takes, _ = TARGETS[name]
    return cli.find_module(command or name).VARIABLES if takes is None else takes


def chosen_device(name: str, values: dict[str, str]) -> str:
    """Return the device whose environment the target runs in, and leave DEVICE in ``values`` only for its command."""
    default = "cuda" if gpu_present() and name != "mutants" else "cpu"
    given = {each: os.environ[each] for each in ["DEVICE"] if os.environ.get(each)} | values
    device = one_of(given, "DEVICE", ["cpu", "cuda"], default)
    values.pop("DEVICE", None)
    if "DEVICE" in given and "DEVICE" in variables(name):
        values["DEVICE"] = device
    return device


def interpreter(name: str, values: Mapping[str, str], device: str, python: str | None, typed: bool = False) -> str:
    """Return the Python to run a target in, and set its environment up unless it is up to date.

    The doctor runs in PYTHON, if that was ``typed`` as a word of make, else in the Python of VERL's environment.
    """
    environment = setup_env.ENVIRONMENTS[device]
    if not TARGETS[name].environment:  # the tree is by default that of the environment, if there is one
        own = name in PATCHING and not {"VERL", "OAT"} & values.keys() and environment.python.exists()
        return str(environment.python) if own else sys.executable
    if name == "doctor":
        verl = Path(values["VERL"]) if "VERL" in values else None
        if verl and not verl.is_dir():
            raise Refused(f"VERL={verl} is not a folder; give a checkout of verl, an unpacked release or site-packages")
        found = shutil.which(python) if typed else verl and environment_python(verl)
        if typed and not found:
            raise Refused(f"PYTHON={python}: no such program")
        if found:
            return found
        advice = "the doctor also runs in PYTHON= with hydra-core and omegaconf, and torch if that verl is patched"
        return str(setup_env.setup(device, None, advice, patch=verl is None))  # another verl is examined
    if name == "mutants":
        setup_env.setup("workers", python)
    return str(setup_env.setup(device, python))


def show_help(name: str) -> NoReturn:
    """Print the variables of a target, and the help of the command that it starts."""
    command, takes, _ = TARGETS[name]
    print("usage: make", name, *(["NAME=VALUE …"] if takes is None else [f"{each}=…" for each in takes]))
    if takes is None:
        print("  NAME=VALUE stands for --name VALUE")
    elif takes:  # the command takes some as arguments, and a flag for yes
        print("  a variable stands for the option or argument of its name, VERL and OAT for TREE, FROM for RELEASE,")
        print("  ARGS for the words of the command line")
    if command.startswith("-m"):
        sys.exit(0)
    print(flush=True)
    os.execv(sys.executable, [*PROGRAM, command or name, "--help"])


def command_line(name: str, values: Mapping[str, str]) -> list[str]:
    """Return the arguments of Python that start what a target stands for, if its command accepts the values."""
    command, takes, _ = TARGETS[name]
    words = arguments(name, values)
    if words[0] == "-m":
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, MODULES), os.environ.get("PYTHONPATH")]))
        return words
    if takes is None:
        cli.find_module(command or name).parse([f"{each}={value}" for each, value in values.items()])
    elif name in ("doctor", "bench", "pr-branch"):
        cli.find_module(name).parse(words[1:])
    return [str(PACKAGE), *words]


def start(name: str, typed: list[str]) -> None:
    """Parse the words, set the environment up, and replace this process by the command."""
    if not {"--help", "-h"}.isdisjoint(typed):
        show_help(name)
    values = dict(word.partition("=")[::2] for word in typed)
    typed_python = bool(values.get("PYTHON"))
    python = values.pop("PYTHON", os.environ.get("PYTHON"))
    sources = {each: values.pop(each) for each in SOURCES if each in values}
    command, takes, _ = TARGETS[name]
    parse_words([f"{each}={value}" for each, value in values.items()], dict.fromkeys([*variables(name), "DEVICE"]))
    if takes is not None or name in ("run", "submit"):  # but FORCE is typed each time
        inherited = {each: os.environ[each] for each in variables(name) if each != "FORCE" and each in os.environ}
        values = inherited | values
    device = chosen_device(name, values)
    if (words := REPO / f"configs/compare/{name}.words").exists():
        lines = words.read_text().splitlines()
        values = dict(line.partition("=")[::2] for line in lines if line and not line.startswith("#")) | values
    program = command_line(name, values)
    os.environ.update(sources)
    python = interpreter(name, values, device, python, typed_python)
    if name != "setup":
        os.environ[MADE] = name
        os.execv(python, [python, *program])


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
