"""Put the precision stack on a tree of verl or OAT, take it off, and work on its patches.

TARGET is a git checkout, an unpacked release or a site-packages folder. Exit code: 0 done, 1 refused or failed
(for status: the target is neither pristine nor patched; for port: there are conflicts to resolve), 2 usage.

With --json, list prints a list of releases, each with its framework, check an object by framework and release
("oat 0.2.4"), status an object.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from lib.errors import Refused
from lib.patches import export as series
from lib.patches import port, stack
from lib.patches.releases import FRAMEWORKS, VERL, Framework, Release, find_release, load_releases


def chosen(args: argparse.Namespace) -> list[Framework]:
    """The framework that --framework names, or all."""
    return [FRAMEWORKS[args.framework]] if args.framework else list(FRAMEWORKS.values())


def named(args: argparse.Namespace) -> Framework:
    """The framework of a release that is given by its name."""
    return FRAMEWORKS[args.framework] if args.framework else VERL


def held(args: argparse.Namespace) -> Framework:
    """The framework of TARGET."""
    return stack.find_target(Path(os.path.abspath(args.target)), *chosen(args)).framework


def list_(args: argparse.Namespace) -> int:
    found = []
    for each in (each for framework in chosen(args) for each in stack.load_stacks(framework=framework)):
        patches = [{"name": patch.name, "subject": patch.subject, **stack.trailers(patch)} for patch in each.patches]
        release = {**asdict(each.release), "framework": each.release.framework.name}
        found.append({**release, "stack": each.id, "patches": patches, "copied": list(each.added)})
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for release in found:
        counts = f"stack {release['stack']}, {len(release['patches'])} patches, {len(release['copied'])} files copied"
        print(f"{release['framework']} {release['name']}: family {release['family']}, {counts}")
        for patch in release["patches"]:
            print(f"  {patch['Reason']:9} {patch['subject']}")
    return 0


def status(args: argparse.Namespace) -> int:
    framework = held(args)
    found = stack.status(args.target, framework=framework)
    if args.json:
        print(json.dumps({"target": str(args.target), "framework": framework.name, **asdict(found)}, indent=2))
    else:
        print(f"{found.state}: {found.detail}")
    return 0 if found.state in ("pristine", "patched", "outdated") else 1


def apply(args: argparse.Namespace) -> int:
    print(*stack.apply(args.target, framework=held(args)), sep="\n")
    return 0


def unapply(args: argparse.Namespace) -> int:
    print(*stack.unapply(args.target, framework=held(args)), sep="\n")
    return 0


def check(args: argparse.Namespace) -> int:
    def one(release: Release) -> dict:
        try:
            return {"ok": True, "detail": series.check(release.name, framework=release.framework)}
        except Refused as fault:
            return {"ok": False, "detail": str(fault)}

    if args.release:
        releases = [find_release(args.release, framework=named(args))]
    else:
        releases = [each for framework in chosen(args) for each in load_releases(framework=framework).values()]
    with ThreadPoolExecutor() as pool:  # most of it is git's work
        results = {str(release): result for release, result in zip(releases, pool.map(one, releases), strict=True)}
    if args.json:
        print(json.dumps(results, indent=2))
    for release, result in results.items():
        if not result["ok"]:
            print(f"patchset: {release}: {result['detail']}", file=sys.stderr)
        elif not args.json:
            print(f"{release}: {result['detail']}: ok")
    return 0 if all(result["ok"] for result in results.values()) else 1


def checkout(args: argparse.Namespace) -> int:
    print(*series.checkout(args.release, args.folder, framework=named(args)), sep="\n")
    return 0


def export(args: argparse.Namespace) -> int:
    print(*series.export(args.folder), sep="\n")
    return 0


def port_(args: argparse.Namespace) -> int:
    lines, done = port.port(args.release, args.to, args.folder, framework=named(args))
    print(*lines, sep="\n")
    return 0 if done else 1


def drift(args: argparse.Namespace) -> int:
    print(*port.drift(args.target, framework=held(args)), sep="\n")
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="patchset", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(run, name: str, what: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=what, description=what)
        added.set_defaults(run=run)
        return added

    listing = command(list_, "list", "show the releases that have a stack, and its patches")
    state = command(status, "status", "say which release TARGET is and whether it is patched; changes nothing")
    putting = command(apply, "apply", "put the stack on TARGET")
    taking = command(unapply, "unapply", "take the stack off TARGET, to the byte")
    checking = command(check, "check", "try the stack of one or all releases (the default) on the wheel from PyPI")
    checking_out = command(checkout, "checkout", "make DIR a git tree with the stack as commits")
    exporting = command(export, "export", "write the commits of DIR, made by checkout, back into the project")
    porting = command(port_, "port", "carry the stack of RELEASE to another one, as commits in DIR, and report on it")
    drifting = command(drift, "drift", "say which files that the closest release's stack hooks TARGET has otherwise")
    for each in (state, putting, taking, drifting):
        each.add_argument("target", type=Path, metavar="TARGET")
    which = checking.add_mutually_exclusive_group()
    which.add_argument("--release", metavar="R")
    which.add_argument("--all", action="store_true")
    for each in (checking_out, porting):
        each.add_argument("release", metavar="RELEASE")
    porting.add_argument("to", metavar="TO", help="a release, known or on PyPI, or a folder that holds the framework")
    for each in (checking_out, exporting, porting):
        each.add_argument("folder", type=Path, metavar="DIR")
    for each in (listing, state, checking):
        each.add_argument("--json", action="store_true", help="print JSON")
    for each, default in {
        listing: "all",
        checking: "all, and verl for --release",
        **dict.fromkeys((checking_out, porting), "verl"),
        **dict.fromkeys((state, putting, taking, drifting), "the one that TARGET holds"),
    }.items():
        each.add_argument("--framework", choices=FRAMEWORKS, help=f"whose stacks; the default is {default}")
    return top


def main() -> int:
    args = parser().parse_args()
    try:
        return args.run(args)
    except (Refused, OSError) as fault:
        print(f"patchset: {fault}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
