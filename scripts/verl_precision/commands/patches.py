"""Apply the patches to a tree of verl or OAT, remove them, and work on them."""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.patch.apply import apply, unapply
from verl_precision.patch.check import check_all
from verl_precision.patch.commits import checkout, export
from verl_precision.patch.port import port
from verl_precision.patch.releases import FRAMEWORKS, find_release, load_releases
from verl_precision.patch.stack import load_stacks
from verl_precision.patch.status import drift, status
from verl_precision.patch.target import find_target, installed_tree
from verl_precision.spelling import spelled
from verl_precision.words import Parser, folder


def show(lines: Iterable[str], done: bool = True) -> int:
    """Print the lines and return the exit code."""
    for line in lines:
        print(spelled(line))
    return 0 if done else 1


def run_status(args: argparse.Namespace) -> int:
    state = status(args.target, framework=args.framework)
    fields = {"target": str(args.target), "framework": args.framework.name, **asdict(state)}
    line = json.dumps(fields, indent=2) if args.json else str(state)
    return show([line], state.state in ("unpatched", "patched", "outdated", "ported"))


def run_apply(args: argparse.Namespace) -> int:
    if args.fixes and not any(stack.fixes for stack in load_stacks(framework=args.framework)):
        raise Refused(f"--fixes: {args.framework.name} has no series fixes; apply without it")
    return show(apply(args.target, framework=args.framework, fixes=args.fixes))


def run_check(args: argparse.Namespace) -> int:
    if args.release:
        releases = [find_release(args.release, framework=args.framework)]
    else:
        releases = [each for framework in args.frameworks for each in load_releases(framework=framework).values()]
    outcomes = check_all(releases)
    for release, passed, detail in outcomes:
        if passed:
            print(f"{release}: {detail}: ok")
        else:
            print(f"verl-precision check: {release}: {detail}", file=sys.stderr)
    return 0 if all(passed for _, passed, _ in outcomes) else 1


FLAG = {"action": "store_true"}
# The arguments of the commands, as argparse takes them.
ARGUMENTS = {
    "target": {
        **{"type": folder, "nargs": "?", "metavar": "TREE"},
        "help": "a git checkout, an unpacked release or a site-packages folder, default: that of the verl or OAT of "
        "this Python",
    },
    "release": {"metavar": "RELEASE", "help": "such as 0.9.1"},
    "to": {"metavar": "TO", "help": "a release on PyPI, or a folder that contains verl or OAT"},
    "folder": {"type": Path, "metavar": "DIR", "help": "a folder; checkout and port make it"},
    "--fixes": {**FLAG, "help": "also apply the series 'fixes', which corrects upstream's defects in any dtype"},
    "--force": {**FLAG, "help": "rename files that were edited since apply to <name>.edited, instead of refusing"},
    "--remove": {**FLAG, "help": "delete patches without a commit"},
    "--release": {"metavar": "R", "help": "one release"},
    "--all": {**FLAG, "help": "all releases, which is the default"},
    "--json": {**FLAG, "help": "print JSON"},
}
# What each command runs, its description, and its arguments except --framework.
COMMANDS = {
    "status": (
        run_status,
        "Report which release TREE is, and whether it is patched.\n\n"
        "Exit code: 0 unpatched, patched, outdated or a port; 1 any other state, or refused.",
        ["target", "--json"],
    ),
    "apply": (
        run_apply,
        "Apply the patches to TREE: all files change, or none.\n\n"
        "A tree with older patches, or with another series, is brought to these. Files that you edited are refused.",
        ["target", "--fixes"],
    ),
    "unapply": (
        lambda args: show(unapply(args.target, framework=args.framework, force=args.force)),
        "Remove the patches from TREE and restore every file exactly.",
        ["target", "--force"],
    ),
    "drift": (
        lambda args: show(drift(args.target, framework=args.framework)),
        "List the patched files of TREE that differ from the closest release.",
        ["target"],
    ),
    "check": (
        run_check,
        "Check the patches of one release, or of all, on the wheel from PyPI: they apply, compile and reverse exactly.",
        ["--release", "--all"],
    ),
    "checkout": (
        lambda args: show(checkout(args.release, args.folder, framework=args.framework)),
        "Make DIR a git tree of RELEASE with each patch as a commit.",
        ["release", "folder"],
    ),
    "export": (
        lambda args: show(export(args.folder, remove=args.remove)),
        "Write the commits of DIR, made by checkout, back into the project.",
        ["--remove", "folder"],
    ),
    "port": (
        lambda args: show(*port(args.release, args.to, args.folder, framework=args.framework)),
        "Port the patches of RELEASE to TO, as commits in DIR, and report on each hunk.\n\n"
        "Exit code: 0 done, 1 refused, or there are conflicts to resolve, which are listed.",
        ["release", "to", "folder"],
    ),
}


def parser(name: str) -> Parser:
    """Return the parser of one of ``COMMANDS``."""
    run, what, takes = COMMANDS[name]
    made = Parser(f"verl-precision {name}", what)
    made.set_defaults(run=run)
    which = made.add_mutually_exclusive_group() if name == "check" else made
    for each in takes:
        (which if each in ("--release", "--all") else made).add_argument(each, **ARGUMENTS[each])
    default = "all, and verl with --release" if name == "check" else "verl"
    made.add_argument("--framework", choices=FRAMEWORKS, help=f"default {default}")
    return made


def main(words: list[str]) -> int:
    """Run the command that the first word names."""
    args = parser(words[0]).parse_args(words[1:])
    args.frameworks = [FRAMEWORKS[args.framework]] if args.framework else [*FRAMEWORKS.values()]
    args.framework = args.frameworks[0]  # of a release that is given by its name
    if "target" in args:
        if args.target is None:
            args.target = installed_tree(args.framework)
            print(f"the {args.framework.name} of {sys.executable}: {args.target}", file=sys.stderr)
        args.framework = find_target(Path(os.path.abspath(args.target)), *args.frameworks).framework
    return args.run(args)
