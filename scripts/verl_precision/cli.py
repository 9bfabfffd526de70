"""The command line: ``verl-precision COMMAND [OPTION ...]``.

A module of ``verl_precision.commands`` runs each command. Its docstring is the description that ``--help`` prints. If
it has VARIABLES, these are its options: its ``parse`` takes a ``NAME=VALUE`` word for each that is set,
and its ``main`` what that returns.
"""

import difflib
import importlib
import os
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from verl_precision import __version__
from verl_precision.errors import Refused
from verl_precision.facts.packages import check_packages
from verl_precision.paths import INSTALLED
from verl_precision.spelling import PATCHING, spelled
from verl_precision.words import Parser, option, options

COMMANDS = {
    "Patch verl or OAT": {
        "apply": "apply the patches to a tree",
        "unapply": "remove the patches and restore every file exactly",
        "status": "report which release a tree contains, and whether it is patched",
        "drift": "list the patched files that differ from the closest release",
        "port": "port the patches to another release",
    },
    "Choose a regime": {
        "doctor": "report the dtype of each hop of a job, before it starts or while it runs",
        "preflight": "predict the effect of fp16 on a model",
        "probe": "measure the mismatch of a model in every regime, before training",
        "recommend": "preflight and probe, then one answer",
        "plan-memory": "plan the GPU memory of a job, without a GPU",
        "trace-update": "trace what the ranks of a job send each other, without GPUs",
        "check-kernels": "compile the kernels of a job for GPUs that are not here",
    },
    "Train and compare": {
        "run": "train with verl in a regime",
        "submit": "train on a running Ray cluster",
        "compare": "train and compare regimes, or compare existing runs",
        "report": "rebuild a report from the runs in its folder",
    },
}
DEVELOPMENT = {
    "Develop, in a checkout of the project": {
        "check": "check that the patches of a release, or of all, apply and reverse exactly",
        "checkout": "make a folder a git tree with the patches of a release as commits",
        "export": "write the commits of such a tree back into the project",
        "pr-branch": "split the patches into branches for upstream, and check them",
        "verify-gpu": "test fp16 on this machine's GPU and measure it",
        "bench": "measure the cost of a precision",
        "bench-amp": "compare fp16, bf16 and fp32 outside verl",
        "setup": "set up the environments of this checkout",
        "lock": "resolve requirements/*.in into *.lock again",
        "try-stack": "train three steps on a CPU with the newest vLLM, or with other versions",
    },
}
HEADINGS = COMMANDS if INSTALLED else COMMANDS | DEVELOPMENT
SUMMARIES = {name: summary for commands in HEADINGS.values() for name, summary in commands.items()}
PATCHES = (*COMMANDS["Patch verl or OAT"], "check", "checkout", "export")
MODULES = {"setup": "setup_env", **dict.fromkeys(PATCHES, "patches")}  # those that are not named after their command
# Packages of other projects that a command needs, by the names under which they are imported.
MODEL = ("torch", "transformers", "safetensors", "pyarrow", "tqdm")
PROBE = (*MODEL, "omegaconf", "numpy")
CONFIG = ("verl", "hydra", "omegaconf", "torch", "ray", "tensordict", "transformers")  # what verl itself imports
JOB = (*CONFIG, "psutil")
REPORT = ("matplotlib", "scipy", "jinja2", "yaml")
NEEDS = {
    **{"preflight": MODEL, "probe": PROBE, "recommend": PROBE, "plan-memory": CONFIG, "run": JOB},
    "trace-update": (*CONFIG, "tqdm"),
    "check-kernels": ("verl", "vllm", "triton", "torch", "tqdm"),
    **{"submit": JOB, "compare": REPORT, "report": REPORT},
    "verify-gpu": ("torch",),
}
# Options without a value of the commands that have VARIABLES: their names in ``main``, and help.
FLAGS = {
    "run": {
        "check": "check the run, and start and write nothing",
        "check_each": 'the same for each object of a JSON list on stdin, such as {"STEPS": "8"}',
    },
    "submit": {"dry_run": "print what would be submitted"},
}


def overview() -> str:
    """Return the help of the command line: the commands under their headings, a line each."""
    lines = ["usage: verl-precision COMMAND [OPTION ...]", ""]
    lines += ["Make verl train and roll out in the same 16 bits, on the release that you already run.", ""]
    for heading, commands in HEADINGS.items():
        lines += [f"{heading}:", *(f"  {name:<13} {summary}" for name, summary in commands.items()), ""]
    lines.append("verl-precision COMMAND --help describes a command; verl-precision --version lists the stacks.")
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
    """Return the module that runs a command.

    Raises:
        Refused: it imports packages that this Python lacks.
    """
    try:
        return importlib.import_module(f"verl_precision.commands.{MODULES.get(name, name.replace('-', '_'))}")
    except ModuleNotFoundError:
        check_packages(NEEDS.get(name, ()))
        raise


def parse(name: str, words: list[str]) -> tuple[Any, dict[str, bool]]:
    """Parse the options of a command that has VARIABLES. Return what these request, and the flags, for its ``main``.

    Hydra overrides of verl, the variable ARGS, may also be given as words.
    """
    module, flags = find_module(name), FLAGS.get(name, {})
    variables = module.VARIABLES
    parser = Parser(f"verl-precision {name}", spelled(module.__doc__, variables))
    groups = {group: ", ".join(options(group)) for group in ("experiment", "precision", "algo", "recipe")}
    for each, text in variables.items():
        parser.add_argument(option(each), dest=each, metavar=each, help=spelled(text.format(**groups), variables))
    for flag, text in flags.items():
        parser.add_argument(option(flag), action="store_true", help=text)
    if "ARGS" in variables:
        what = "a further Hydra override of verl, such as trainer.save_freq=5; after -- if it looks like an option"
        parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=what)
        parsed = parser.parse_overrides(words)
        for word in parsed.overrides:
            each, _, value = word.partition("=")
            if each in variables:
                raise Refused(f"'{word}' is a variable of make; write {option(each)} {value}")
        parsed.ARGS = " ".join(filter(None, [parsed.ARGS, shlex.join(parsed.overrides)]))
    else:
        parsed = parser.parse_args(words)
    settings = [f"{each}={value}" for each in variables if (value := getattr(parsed, each))]
    return module.parse(settings), {flag: getattr(parsed, flag) for flag in flags}


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
        if name not in SUMMARIES:
            near = [PATCHING.get(name), *difflib.get_close_matches(name, (*SUMMARIES, "--version"), n=1, cutoff=0.7)]
            hints = [f"did you mean {each}? " for each in near if each]
            raise Refused(f"{name}: is not a command; {''.join(hints[:1])}--help lists them")
        module = find_module(name)
        variables = getattr(module, "VARIABLES", ())
    with handled_errors(f"verl-precision {name}", variables or ("ARGS",)):
        if not variables:
            return module.main([name, *rest] if name in PATCHES else rest)
        request, flags = parse(name, rest)
        check_packages(NEEDS.get(name, ()))
        return module.main(request, **flags)


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
        paths = " -> ".join(str(path) for path in (error.filename, error.filename2) if path)
        sys.exit(": ".join(str(part) for part in (command, paths, error.strerror or error) if part))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{command}: exit code {error.returncode}: {' '.join(map(str, error.cmd))}")
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted; repeat the command to continue", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        traceback.print_exc()
        cause = " ".join(traceback.format_exception_only(error)[-1].split())
        sys.exit(f"{command}: {cause}; this is a defect: open an issue with these lines")
