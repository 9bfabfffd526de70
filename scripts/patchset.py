"""Apply the precision stack to a tree of verl or OAT, remove it, and work on its patches.

TARGET is a git checkout, an unpacked release or a site-packages folder. Exit code: 0 done, 1 refused or failed
(for status: the target is neither a release nor patched; for port, carry: there are conflicts to resolve), 2 usage.

With --json, list prints a list of stacks, each with its release and framework, check an object by framework and release
("oat 0.2.4"), status an object.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - before anything is imported that an older Python cannot read
    sys.exit(f"patchset: Python 3.10 or later is needed; {sys.executable} is {sys.version.split()[0]}")

import argparse
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out

from verl_precision.cli import handled_errors
from verl_precision.errors import Refused
from verl_precision.patch.apply import apply, unapply
from verl_precision.patch.carry import carry_patch
from verl_precision.patch.check import check_all
from verl_precision.patch.checkout import checkout
from verl_precision.patch.export import export
from verl_precision.patch.port import port
from verl_precision.patch.releases import FRAMEWORKS, VERL, Framework, find_release, load_releases
from verl_precision.patch.stack import load_stacks
from verl_precision.patch.status import drift, status
from verl_precision.patch.target import find_target


def frameworks(args: argparse.Namespace) -> list[Framework]:
    """Return the framework that --framework names, or all."""
    return [FRAMEWORKS[args.framework]] if args.framework else list(FRAMEWORKS.values())


def framework_of_release(args: argparse.Namespace) -> Framework:
    """Return the framework of a release that is given by its name."""
    return FRAMEWORKS[args.framework] if args.framework else VERL


def framework_of_target(args: argparse.Namespace) -> Framework:
    """Return the framework of TARGET."""
    return find_target(Path(os.path.abspath(args.target)), *frameworks(args)).framework


def show(lines: Iterable[str], done: bool = True) -> int:
    """Print the lines and return the exit code."""
    for line in lines:
        print(line)
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
            print(f"patchset: {release}: {outcome['detail']}", file=sys.stderr)
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


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="patchset", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(run, name: str, what: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=what, description=what)
        added.set_defaults(run=run)
        return added

    listing = command(run_list, "list", "list the releases that have a stack, and their patches")
    state = command(run_status, "status", "report which release TARGET is and whether it is patched; changes nothing")
    putting = command(run_apply, "apply", "apply the stack to TARGET")
    taking = command(run_unapply, "unapply", "remove the stack from TARGET and restore its files exactly")
    checking = command(
        run_check, "check", "check the stack of one or all releases (the default) on the wheel from PyPI"
    )
    checking_out = command(run_checkout, "checkout", "make DIR a git tree with the stack as commits")
    exporting = command(run_export, "export", "write the commits of DIR, made by checkout, back into the project")
    porting = command(run_port, "port", "port the stack of RELEASE to another one, as commits in DIR, and report on it")
    carrying = command(
        run_carry, "carry", "carry a changed patch of RELEASE to the others; DIR gets the trees with conflicts"
    )
    drifting = command(run_drift, "drift", "list the patched files of TARGET that differ from the closest release")
    for each in (state, putting, taking, drifting):
        each.add_argument("target", type=Path, metavar="TARGET")
    edits = "rename files that were edited since apply to <name>.edited, instead of refusing"
    taking.add_argument("--force", action="store_true", help=edits)
    putting.add_argument(
        "--fixes", action="store_true", help="also apply the series fixes, which corrects defects in any dtype"
    )
    exporting.add_argument("--remove", action="store_true", help="delete the patches that have no commit in DIR")
    which = checking.add_mutually_exclusive_group()
    which.add_argument("--release", metavar="R")
    which.add_argument("--all", action="store_true")
    carrying.add_argument("patch", metavar="PATCH")
    for each in (checking_out, porting, carrying):
        each.add_argument("release", metavar="RELEASE")
    porting.add_argument(
        "to", metavar="TO", help="a release in versions.toml or on PyPI, or a folder that contains the framework"
    )
    for each in (checking_out, exporting, porting, carrying):
        each.add_argument("folder", type=Path, metavar="DIR")
    for each in (listing, state, checking):
        each.add_argument("--json", action="store_true", help="print JSON")
    for each, default in {
        listing: "all",
        checking: "all, and verl for --release",
        **dict.fromkeys((checking_out, porting, carrying), "verl"),
        **dict.fromkeys((state, putting, taking, drifting), "the one that TARGET contains"),
    }.items():
        each.add_argument("--framework", choices=FRAMEWORKS, help=f"framework of the stacks; the default is {default}")
    return top


def main() -> int:
    args = parser().parse_args()
    return args.run(args)


if __name__ == "__main__":
    with handled_errors("patchset"):
        sys.exit(main())
