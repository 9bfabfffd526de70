"""Report a job's effective dtypes, hop by hop.

Takes ``main_ppo``'s own overrides, composes the configuration of the verl in DIR and resolves the dtypes of its
trainer, wire and rollout, without importing it. Exit code 0: trainer and rollout agree, or differ as requested; 1: they
differ without a request for it, this verl refuses the config, a dtype is unknown, or the input is bad.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from verl_precision.doctor.diagnosis import Diagnosis, diagnose
from verl_precision.doctor.hardware import diagnose_on, gpus_here, hardware_lines
from verl_precision.doctor.requirements import missing
from verl_precision.doctor.resolver import HOPS, Hop
from verl_precision.doctor.tree import Tree, identify_tree
from verl_precision.errors import Refused
from verl_precision.facts.packages import check_packages
from verl_precision.parser import Parser, folder
from verl_precision.patch.releases import VERL
from verl_precision.patch.target import installed_tree
from verl_precision.spelling import spelled
from verl_precision.words import shell_words

COMMAND = re.compile(r"(?:make|verl-precision) [a-z-]+(?: (?:--|/|[A-Z]+=)\S*)+")
KEPT = "\xa0"  # a blank at which textwrap does not break


def examined(verl: Path | None) -> Tree:
    """Return the tree in the folder ``verl``, or the installed one.

    Raises:
        Refused: this Python lacks a package that the doctor needs for it.
    """
    tree = identify_tree(verl or installed_tree(VERL))
    if lacking := missing(tree.root):
        ways = f"install them there, or give another Python: make doctor VERL={tree.root} PYTHON=/path/to/python3"
        raise Refused(f"{sys.executable} lacks {', '.join(lacking)}: {ways}")
    return tree


def row(name: str, hop: Hop) -> tuple[str, str, str, str]:
    requested = ", ".join(str(value) for value in hop.requested.values()) or "-"
    return name, requested, hop.effective_dtype or "-", hop.reason


def scaler_lines(scalers: Mapping[str, Mapping | None]) -> list[str]:
    """Return a line for each role whose loss is scaled."""
    lines = []
    for role, settings in scalers.items():
        if settings:
            values = ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
            lines.append(wrapped(f"loss scaler of the {role}: {values}"))
    return lines


def text(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text: a table of the hops, the scalers, the findings and the verdict."""
    tree = diagnosis.tree
    parts = [f"{tree.name}, {tree.state}" + (f", stack {tree.stack}" if tree.stack else "") + f", in {tree.root}"]
    parts += [wrapped(tree.advice)] if tree.advice else []
    if not diagnosis.refused:
        rows = [("hop", "requested", "effective", "because")]
        rows += [row(name, hop) for name, hop in diagnosis.hops.items()]
        widths = [max(len(each[column]) for each in rows) for column in range(3)]
        parts.append("\n".join("  ".join([*map(str.ljust, each, widths), each[3]]) for each in rows))
    parts += scaler_lines(diagnosis.scaler)
    if diagnosis.bitwise:
        parts.append(wrapped(f"agreement to the bit: cannot hold: {'; '.join(diagnosis.bitwise)}"))
    parts += [wrapped(f"hardware: {line}") for line in hardware_lines(diagnosis)]
    for finding in diagnosis.findings:
        value = "" if finding.value is None else f"={finding.value}"
        fix = wrapped(f"fix: {finding.mend}", indent="  ")
        parts.append(f"{wrapped(f'{finding.key}{value} {finding.effect}')}\n{fix}")
    return "\n\n".join([*parts, spelled(f"{diagnosis.verdict}: {diagnosis.sentence}")])


def live_text(diagnosis: Mapping) -> str:
    """Return the diagnosis of a running job as text."""
    code = "; ".join(f"verl {each['release']}, stack {each['stack']}" for each in diagnosis["verl"])
    width = max(map(len, diagnosis["hops"]))
    parts = [f"{code}, running"]
    parts.append("\n".join(f"{hop.ljust(width)}  {dtype or '-'}" for hop, dtype in diagnosis["hops"].items()))
    parts += scaler_lines(diagnosis["scaler"])
    if deterministic := [part for part, on in diagnosis["deterministic"].items() if on]:
        parts.append(f"deterministic: {', '.join(deterministic)}")
    for finding in diagnosis["findings"]:
        fix = wrapped(f"fix: {finding['mend']}", indent="  ")
        parts.append(wrapped(f"{finding['key']} {finding['effect']}") + f"\n{fix}")
    return "\n\n".join([*parts, spelled(f"{diagnosis['verdict']}: {diagnosis['sentence']}")])


def wrapped(line: str, indent: str = "") -> str:
    """Return the line wrapped, but not within a command of this project."""
    whole = COMMAND.sub(lambda found: found[0].replace(" ", KEPT), spelled(line))
    text = textwrap.fill(
        whole, 118, initial_indent=indent, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )
    return text.replace(KEPT, " ")


def parser() -> Parser:
    made = Parser("verl-precision doctor", __doc__)
    made.add_argument("--verl", type=folder, metavar="DIR", help="a checkout, an unpacked release or site-packages")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument(
        "--live", action="store_true", help="query running workers: of RAY_ADDRESS, else of this machine's cluster"
    )
    made.add_argument("--config-name", default="ppo_trainer", metavar="NAME", help="main_ppo's --config-name")
    made.add_argument(
        "--args", default="", metavar="WORDS", help="further overrides in one string, as make passes them"
    )
    made.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="an override of main_ppo")
    return made


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line. Return its options, and the overrides, those of --args first.

    Raises:
        Refused: an option is unknown or lacks its value, or a quotation mark is not closed.
    """
    options = parser().parse_overrides(words)
    return options, [*shell_words("ARGS", options.args), *options.overrides]


def main(words: list[str]) -> int:
    args, overrides = parse(words)
    if args.live:
        return live(args, overrides)
    diagnosis = diagnose_on(gpus_here(), examined(args.verl), overrides, args.config_name)
    print(spelled(json.dumps(diagnosis.json(), indent=2)) if args.json else text(diagnosis))
    return 0 if diagnosis.sound else 1


def live(args: argparse.Namespace, overrides: list[str]) -> int:
    """Print the diagnosis of the running job, compared with that of ``overrides`` where there are any."""
    check_packages(("torch", "ray", "psutil"))
    from verl_precision.doctor.live import diagnose_live, query_job

    static = diagnose(examined(args.verl), overrides, args.config_name).json() if overrides else None
    if static and static["refused"]:
        raise Refused(f"--live: no job can run this config: {static['refused']}")
    diagnosis = diagnose_live(query_job(), HOPS, static)
    print(spelled(json.dumps(diagnosis, indent=2)) if args.json else live_text(diagnosis))
    return 0 if diagnosis["verdict"] in ("agree", "asked") else 1
