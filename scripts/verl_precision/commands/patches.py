"""Apply the patches to a tree of verl or OAT, remove them, and work on them."""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.parser import Parser, folder
from verl_precision.patch.apply import apply, unapply
from verl_precision.patch.carry import carry_patch
from verl_precision.patch.check import check_all
from verl_precision.patch.checkout import checkout
from verl_precision.patch.export import export
from verl_precision.patch.port import port
from verl_precision.patch.releases import FRAMEWORKS, VERL, Framework, find_release, load_releases
from verl_precision.patch.stack import load_stacks
from verl_precision.patch.status import drift, status
from verl_precision.patch.target import find_target, installed_tree
from verl_precision.spelling import spelled


def frameworks(args: argparse.Namespace) -> list[Framework]:
    """Return the framework that --framework names, or all."""
    return [FRAMEWORKS[args.framework]] if args.framework else list(FRAMEWORKS.values())


def framework_of_release(args: argparse.Namespace) -> Framework:
    """Return the framework of a release that is given by its name."""
    return FRAMEWORKS[args.framework] if args.framework else VERL


def framework_of_target(args: argparse.Namespace) -> Framework:
    """Return the framework of TREE."""
    return find_target(Path(os.path.abspath(args.target)), *frameworks(args)).framework


def show(lines: Iterable[str], done: bool = True) -> int:
    """Print the lines and return the exit code."""
    for line in lines:
        print(spelled(line))
    return 0 if done else 1


def run_list(args: argparse.Namespace) -> int:
    releases = [stack.describe() for framework in frameworks(args) for stack in load_stacks(framework=framework)]
    if args.json:
        return show([json.dumps(releases, indent=2)])
    for release in releases:
        stack = f"stack {release['stack']}" + f" ({release['series']})" * bool(release["series"])
        counts = f"{stack}, {len(release['patches'])} patches, {len(release['copied'])} files copied"
        print(f"{release['framework']} {release['name']}: family {release['family']}, {counts}")
        show(f"  {patch['Reason']:9} {patch['subject']}" for patch in release["patches"])
    return 0


def run_status(args: argparse.Namespace) -> int:
    framework = framework_of_target(args)
    state = status(args.target, framework=framework)
    fields = {"target": str(args.target), "framework": framework.name, **asdict(state)}
    line = json.dumps(fields, indent=2) if args.json else str(state)
    return show([line], state.state in ("unpatched", "patched", "outdated", "ported"))


def run_apply(args: argparse.Namespace) -> int:
    framework = framework_of_target(args)
    if args.fixes and not any(stack.fixes for stack in load_stacks(framework=framework)):
        raise Refused(f"--fixes: {framework.name} has no series fixes; apply without it")
    return show(apply(args.target, framework=framework, fixes=args.fixes))


def run_unapply(args: argparse.Namespace) -> int:
    return show(unapply(args.target, framework=framework_of_target(args), force=args.force))


def run_check(args: argparse.Namespace) -> int:
    if args.release:
        releases = [find_release(args.release, framework=framework_of_release(args))]
    else:
        releases = [each for framework in frameworks(args) for each in load_releases(framework=framework).values()]
    outcomes = check_all(releases)
    if args.json:
        print(json.dumps(outcomes, indent=2))
    for release, outcome in outcomes.items():
        if not outcome["ok"]:
            print(f"verl-precision check: {release}: {outcome['detail']}", file=sys.stderr)
        elif not args.json:
            print(f"{release}: {outcome['detail']}: ok")
    return 0 if all(outcome["ok"] for outcome in outcomes.values()) else 1


def run_checkout(args: argparse.Namespace) -> int:
    return show(checkout(args.release, args.folder, framework=framework_of_release(args)))


def run_export(args: argparse.Namespace) -> int:
    return show(export(args.folder, remove=args.remove))


def run_port(args: argparse.Namespace) -> int:
    return show(*port(args.release, args.to, args.folder, framework=framework_of_release(args)))


def run_carry(args: argparse.Namespace) -> int:
    return show(*carry_patch(args.patch, args.release, args.folder, framework=framework_of_release(args)))


def run_drift(args: argparse.Namespace) -> int:
    return show(drift(args.target, framework=framework_of_target(args)))


def add_check(parser: Parser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--release", metavar="R", help="one release")
    which.add_argument("--all", action="store_true", help="all releases, which is the default")


FORCE = "rename files that were edited since apply to <name>.edited, instead of refusing"
FIXES = "also apply the series 'fixes', which corrects upstream's defects in any dtype"
TO = "a release on PyPI, or a folder that contains verl or OAT"
TREE = "a git checkout, an unpacked release or a site-packages folder, default: that of the verl or OAT of this Python"
CONFLICTS = "Exit code: 0 done, 1 refused, or there are conflicts to resolve, which are listed."
# What each command runs, its description, and the arguments that it takes beside --framework.
COMMANDS = {
    "list": (run_list, "List the releases that have patches, and their patches.", ["json"]),
    "status": (
        run_status,
        "Report which release TREE is, and whether it is patched.\n\n"
        "Exit code: 0 unpatched, patched, outdated or a port; 1 any other state, or refused.",
        ["tree", "json"],
    ),
    "apply": (
        run_apply,
        "Apply the patches to TREE: all files change, or none.\n\n"
        "A tree with older patches, or with another series, is brought to these. Files that you edited are refused.",
        ["tree", "fixes"],
    ),
    "unapply": (run_unapply, "Remove the patches from TREE and restore every file exactly.", ["tree", "force"]),
    "drift": (run_drift, "List the patched files of TREE that differ from the closest release.", ["tree"]),
    "check": (
        run_check,
        "Check the patches of one release, or of all, on the wheel from PyPI: they apply, compile and reverse exactly.",
        ["which", "json"],
    ),
    "checkout": (run_checkout, "Make DIR a git tree of RELEASE with each patch as a commit.", ["release", "folder"]),
    "export": (run_export, "Write the commits of DIR, made by checkout, back into the project.", ["remove", "folder"]),
    "port": (
        run_port,
        f"Port the patches of RELEASE to TO, as commits in DIR, and report on each hunk.\n\n{CONFLICTS}",
        ["release", "to", "folder"],
    ),
    "carry": (
        run_carry,
        "Carry a changed patch of RELEASE to the other releases; DIR gets the trees that have conflicts.\n\n"
        f"{CONFLICTS}",
        ["patch", "release", "folder"],
    ),
}


def parser(name: str) -> Parser:
    """Return the parser of one of ``COMMANDS``."""
    run, what, takes = COMMANDS[name]
    made = Parser(f"verl-precision {name}", what)
    made.set_defaults(run=run)
    add = {
        "tree": lambda: made.add_argument("target", type=folder, nargs="?", metavar="TREE", help=TREE),
        "force": lambda: made.add_argument("--force", action="store_true", help=FORCE),
        "fixes": lambda: made.add_argument("--fixes", action="store_true", help=FIXES),
        "remove": lambda: made.add_argument("--remove", action="store_true", help="delete patches without a commit"),
        "which": lambda: add_check(made),
        "patch": lambda: made.add_argument("patch", metavar="PATCH", help="its name, without .patch"),
        "release": lambda: made.add_argument("release", metavar="RELEASE", help="such as 0.9.1"),
        "to": lambda: made.add_argument("to", metavar="TO", help=TO),
        "folder": lambda: made.add_argument(
            "folder", type=Path, metavar="DIR", help="a folder; checkout, port and carry make it"
        ),
        "json": lambda: made.add_argument("--json", action="store_true", help="print JSON"),
    }
    for each in takes:
        add[each]()
    default = {"list": "all", "check": "all, and verl with --release"}.get(name, "verl")
    made.add_argument("--framework", choices=FRAMEWORKS, help=f"default {default}")
    return made


def main(words: list[str]) -> int:
    """Run the command that the first word names."""
    args = parser(words[0]).parse_args(words[1:])
    if "target" in args and args.target is None:
        framework = framework_of_release(args)
        args.target = installed_tree(framework)
        print(f"the {framework.name} of {sys.executable}: {args.target}", file=sys.stderr)
    return args.run(args)
