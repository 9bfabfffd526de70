"""Which dtype really holds, hop by hop: ``scripts/doctor.py [--verl DIR] [--json] [OVERRIDE ...]``.

Takes ``main_ppo``'s own overrides, composes the configuration of the verl in DIR and says what its trainer, wire and
rollout make of it, without importing it. Exit code 0: trainer and rollout agree, or differ as asked for; 1: they
differ and nobody asked for it, this verl refuses the config, it cannot be said, or the input is bad.
"""

import argparse
import importlib.util
import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from lib.cli import shell_words
from lib.doctor.diagnosis import Diagnosis, diagnose
from lib.doctor.requirements import missing
from lib.doctor.resolver import HOPS, Hop
from lib.doctor.tree import Tree, look_at
from lib.errors import Refused


def installed() -> Path:
    """The folder of the verl that this Python would import.

    Raises:
        Refused: there is none.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise Refused("no verl is installed here: name one, VERL=DIR or --verl DIR")
    return Path(spec.submodule_search_locations[0]).parent


def examined(verl: Path | None) -> Tree:
    """Return what the folder ``verl`` contains, or the installed verl.

    Raises:
        Refused: this Python lacks a package that the doctor needs for it.
    """
    tree = look_at(verl or installed())
    if lacking := missing(tree.root):
        ways = f"install it there, or name another Python: make doctor VERL={tree.root} PYTHON=/path/to/python3"
        raise Refused(f"{sys.executable} lacks {', '.join(lacking)}: {ways}")
    return tree


def row(name: str, hop: Hop) -> tuple[str, str, str, str]:
    asked = ", ".join(str(value) for value in hop.asked.values()) or "-"
    return name, asked, "-" if hop.holds is None else hop.holds, hop.because


def scalers(by_role: Mapping[str, Mapping | None]) -> list[str]:
    """A line for each role whose loss is scaled."""
    told = {role: [f"{k} {v}" for k, v in of.items() if v is not None] for role, of in by_role.items() if of}
    return [wrapped(f"loss scaler of the {role}: {', '.join(settings)}") for role, settings in told.items()]


def text(found: Diagnosis) -> str:
    """The diagnosis as a table, the scalers, the findings and the sentence, for people."""
    tree = found.tree
    parts = [f"{tree.name}, {tree.state}" + (f", stack {tree.stack}" if tree.stack else "") + f", in {tree.root}"]
    if not found.refused:
        rows = [("hop", "asked for", "holds", "because"), *(row(name, hop) for name, hop in found.hops.items())]
        widths = [max(len(each[column]) for each in rows) for column in range(3)]
        parts.append("\n".join("  ".join([*map(str.ljust, each, widths), each[3]]) for each in rows))
    parts += scalers(found.scaler)
    for finding in found.findings:
        value = "" if finding.value is None else f"={finding.value}"
        mend = wrapped(f"mend: {finding.mend}", indent="  ")
        parts.append(f"{wrapped(f'{finding.key}{value} {finding.effect}')}\n{mend}")
    return "\n\n".join([*parts, f"{found.verdict}: {found.sentence}"])


def live_text(found: dict) -> str:
    """What the running workers hold, as a table, for people."""
    parts = ["; ".join(f"verl {each['release']}, stack {each['stack']}" for each in found["verl"]) + ", running"]
    width = max(map(len, found["hops"]))
    parts.append("\n".join(f"{hop.ljust(width)}  {held or '-'}" for hop, held in found["hops"].items()))
    parts += scalers(found["scaler"])
    for each in found["findings"]:
        parts.append(
            wrapped(each["key"] + ": " + each["effect"]) + "\n" + wrapped("mend: " + each["mend"], indent="  ")
        )
    return "\n\n".join([*parts, f"{found['verdict']}: {found['sentence']}"])


def wrapped(line: str, indent: str = "") -> str:
    return textwrap.fill(line, 118, initial_indent=indent, subsequent_indent="  ", break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise Refused(f"{message}; --help shows what it takes")


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="doctor", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--verl", type=Path, metavar="DIR", help="a checkout, an unpacked release or site-packages")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument(
        "--live", action="store_true", help="ask the running workers: RAY_ADDRESS, else this machine's cluster"
    )
    made.add_argument("--config-name", default="ppo_trainer", metavar="NAME", help="as main_ppo takes it")
    made.add_argument("--args", default="", metavar="WORDS", help="further overrides as one word, as make has them")
    made.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as main_ppo takes them")
    return made


def main(words: list[str]) -> int:
    args = parser().parse_intermixed_args(words)
    overrides = [*shell_words("ARGS", args.args), *args.overrides]
    if args.live:
        return live(args, overrides)
    found = diagnose(examined(args.verl), overrides, args.config_name)
    print(json.dumps(found.json(), indent=2) if args.json else text(found))
    return 0 if found.sound else 1


def live(args: argparse.Namespace, overrides: list[str]) -> int:
    """What the running workers hold and, where overrides are given, whether that is what they make."""
    from lib.doctor.live import ask, report

    static = diagnose(examined(args.verl), overrides, args.config_name).json() if overrides else None
    if static and static["refused"]:
        raise Refused(f"--live: no job runs this config: {static['refused']}")
    found = report(ask(), HOPS, static)
    print(json.dumps(found, indent=2) if args.json else live_text(found))
    return 0 if found["verdict"] in ("agree", "asked") else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (Refused, OSError) as refusal:
        sys.exit(f"doctor: {refusal}")
