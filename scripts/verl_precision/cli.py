"""The command line: ``verl-precision COMMAND [OPTION ...]``."""

import difflib
import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

from verl_precision import __version__
from verl_precision.errors import Refused
from verl_precision.facts.packages import check_packages
from verl_precision.parser import Parser
from verl_precision.paths import INSTALLED
from verl_precision.spelling import PATCHING, add_options, spelled, values_of


@dataclass(frozen=True)
class Command:
    """A command, which a module of ``verl_precision.commands`` runs.

    The module's docstring is the description that ``--help`` prints. Its ``main`` takes the command's arguments, or
    with ``variables`` a ``NAME=VALUE`` word for each of its VARIABLES that was set by an option.
    """

    summary: str
    module: str = ""  # if its name is not the command's
    variables: bool = False  # whether the options are the module's VARIABLES
    flags: Mapping[str, str] = field(default_factory=dict)  # further options of such a command, without a value
    needs: tuple[str, ...] = ()  # packages of other projects, by the names under which they are imported


def patching(summary: str) -> Command:
    return Command(summary, "patches")


def setting(summary: str, needs: tuple[str, ...] = (), module: str = "", **flags: str) -> Command:
    named = {f"--{name.replace('_', '-')}": text for name, text in flags.items()}
    return Command(summary, module, True, named, needs)


MODEL = ("torch", "transformers", "safetensors", "pyarrow", "matplotlib", "tqdm")
PROBE = (*MODEL, "omegaconf", "numpy")
CONFIG = ("verl", "hydra", "omegaconf", "torch", "ray", "tensordict", "transformers")  # what verl itself imports
JOB = (*CONFIG, "psutil")
REPORT = ("matplotlib", "scipy", "jinja2", "yaml")

COMMANDS = {
    "Patch verl or OAT": {
        "apply": patching("apply the patches to a tree"),
        "unapply": patching("remove the patches and restore every file exactly"),
        "status": patching("report which release a tree contains, and whether it is patched"),
        "drift": patching("list the patched files that differ from the closest release"),
        "port": patching("port the patches to another release"),
        "list": patching("list the releases that have patches, and their patches"),
    },
    "Choose a regime": {
        "doctor": Command("report the dtype of each hop of a job, before it starts or while it runs"),
        "preflight": setting("predict the effect of fp16 on a model", MODEL),
        "probe": setting("measure the mismatch of a model in every regime, before training", PROBE),
        "recommend": setting("preflight and probe, then one answer", PROBE),
        "plan-memory": setting("plan the GPU memory of a job, without a GPU", CONFIG, "plan_memory"),
    },
    "Train and compare": {
        "run": setting(
            "train with verl in a regime",
            (*JOB, "matplotlib"),
            check="check the run, and start and write nothing",
            check_each='the same for each object of a JSON list on stdin, such as {"STEPS": "8"}',
        ),
        "submit": setting("train on a running Ray cluster", JOB, dry_run="print what would be submitted"),
        "compare": setting("train and compare regimes, or compare existing runs", REPORT),
        "report": setting("rebuild a report from the runs in its folder", REPORT),
        "collapse": setting("train a model that bf16 destroys and fp16 trains", (*JOB, *REPORT)),
    },
}
DEVELOPMENT = {
    "Develop, in a checkout of the project": {
        "check": patching("check that the patches of a release, or of all, apply and reverse exactly"),
        "checkout": patching("make a folder a git tree with the patches of a release as commits"),
        "export": patching("write the commits of such a tree back into the project"),
        "carry": patching("carry a changed patch to the other releases"),
        "pr-branch": Command("split the patches into branches for upstream, and check them", "pr_branch"),
        "verify-gpu": setting("test fp16 on this machine's GPU and measure it", ("torch",), "verify_gpu"),
        "bench": Command("measure the cost of a precision"),
        "bench-amp": Command("compare fp16, bf16 and fp32 outside verl", "bench_amp", needs=("torch", "matplotlib")),
        "setup": Command("set up the environments of this checkout", "setup_env"),
        "wheelhouse": setting("pack the wheels of an environment for machines without a network"),
        "lock": Command("resolve requirements/*.in into *.lock again"),
    },
}
HEADINGS = COMMANDS if INSTALLED else COMMANDS | DEVELOPMENT
BY_NAME = {name: command for commands in HEADINGS.values() for name, command in commands.items()}


def overview() -> str:
    """Return the help of the command line: the commands under their headings, a line each."""
    lines = ["usage: verl-precision COMMAND [OPTION ...]", ""]
    lines += ["Make verl train and roll out in the same 16 bits, on the release that you already run.", ""]
    for heading, commands in HEADINGS.items():
        lines += [f"{heading}:", *(f"  {name:<12} {command.summary}" for name, command in commands.items()), ""]
    lines += ["verl-precision COMMAND --help describes a command; verl-precision --version lists the stacks."]
    return "\n".join(lines)


def version() -> str:
    """Return the version of the project, and the stacks that it applies to each release."""
    from verl_precision.patch.releases import FRAMEWORKS
    from verl_precision.patch.stack import load_stacks

    lines = [f"verl-precision {__version__}"]
    for framework in FRAMEWORKS.values():
        for stack in load_stacks(framework=framework):
            series = f" ({stack.series})" if stack.series else ""
            lines.append(f"  {framework.name} {stack.release.name}: stack {stack.id}{series}")
    return "\n".join(lines)


def find_module(name: str) -> ModuleType:
    """Return the module that runs a command."""
    return importlib.import_module(f"verl_precision.commands.{BY_NAME[name].module or name}")


def parse(name: str, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Parse the options of a command that has variables. Return these and the flags that are set."""
    command, module = BY_NAME[name], find_module(name)
    parser = Parser(f"verl-precision {name}", spelled(module.__doc__ or "", module.VARIABLES))
    add_options(parser, module.VARIABLES)
    for flag, text in command.flags.items():
        parser.add_argument(flag, action="store_true", help=text)
    takes_overrides = "ARGS" in module.VARIABLES
    parsed = parser.parse_overrides(words) if takes_overrides else parser.parse_intermixed_args(words)
    flags = [flag for flag in command.flags if getattr(parsed, flag.strip("-").replace("-", "_"))]
    return values_of(parsed, module.VARIABLES), flags


def main(words: list[str] | None = None) -> int:
    """Run the command line with ``words``, by default this process's arguments. Return the exit code."""
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, *rest = words
    with handled_errors("verl-precision"):
        if name == "--version":
            print(version())
            return 0
        if name not in BY_NAME:
            names = difflib.get_close_matches(name, (*BY_NAME, "--version"), n=1, cutoff=0.7)
            near = [f"did you mean {each}? " for each in [*filter(None, [PATCHING.get(name)]), *names][:1]]
            raise Refused(f"{name}: is not a command; {''.join(near)}--help lists them")
        command = BY_NAME[name]
        if not command.variables:  # it is imported with its packages
            check_packages(command.needs)
        module = find_module(name)
    variables = module.VARIABLES if command.variables else ("ARGS",)
    with handled_errors(f"verl-precision {name}", variables):
        if command.variables:
            values, flags = parse(name, rest)
            settings = [f"{each}={value}" for each, value in values.items()]
            module.parse(settings)
            check_packages(command.needs)
            return module.main([*flags, *settings])
        return module.main([name, *rest] if command.module == "patches" else rest)


@contextmanager
def handled_errors(command: str, variables: Iterable[str] = ()) -> Iterator[None]:
    """Run the ``main`` of a command: print one line about what is no defect, and ask for a report of what is one.

    Exits with 1 after a refusal, an error of the system or of a program that was started, and any other exception,
    whose traceback it prints; with 130 after Ctrl-C, with 141 if the reader of stdout is gone, as ``head`` may be.
    A refusal may name the ``variables`` of the command.
    """
    for stream in (sys.stdout, sys.stderr):  # a path may have characters that the terminal's encoding lacks
        stream.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, so that a closed pipe is handled below
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it exits
        sys.exit(128 + signal.SIGPIPE)
    except Refused as refusal:
        sys.exit(f"{command}: {spelled(str(refusal), variables)}")
    except OSError as error:
        sys.exit(f"{command}: {system_error(error)}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{command}: exit code {error.returncode}: {' '.join(map(str, error.cmd))}")
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted; repeat the command to continue", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        traceback.print_exc()
        cause = " ".join(traceback.format_exception_only(error)[-1].split())
        sys.exit(f"{command}: {cause}; this is a defect: open an issue with these lines")


def system_error(error: OSError) -> str:
    """Return the paths of an error of the system, and what is wrong with them."""
    paths = " -> ".join(str(path) for path in (error.filename, error.filename2) if path)
    return ": ".join(str(part) for part in (paths, error.strerror or error) if part)
