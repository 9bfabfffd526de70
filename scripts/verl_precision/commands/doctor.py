"""Report a job's effective dtypes, hop by hop.

Takes ``main_ppo``'s own overrides, composes the configuration of the verl in DIR and resolves the dtypes of its
trainer, wire and rollout, without importing it. Exit code 0: trainer and rollout agree, or differ as requested; 1: they
differ without a request for it, this verl refuses the config, a dtype is unknown, or the input is bad.
"""

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_precision.doctor.diagnosis import SOUND, Diagnosis, diagnose
from verl_precision.doctor.findings import Finding
from verl_precision.doctor.interpreter import missing
from verl_precision.doctor.refusals import GROUPS
from verl_precision.doctor.resolver import HOPS, Hop
from verl_precision.doctor.tree import Tree, identify_tree
from verl_precision.errors import Refused
from verl_precision.facts.gpus import Gpu, find_gpus
from verl_precision.facts.packages import check_packages, package_folder
from verl_precision.patch.releases import VERL
from verl_precision.patch.target import installed_tree
from verl_precision.run.machine import GUIDE
from verl_precision.spelling import spelled
from verl_precision.words import Parser, folder, gpu_present, shell_words

# The hops in whose dtype a GPU multiplies.
COMPUTING = ("actor.compute", "actor.autocast", "ref.compute", "critic.compute", "rollout.weights")
LEAST_CAPABILITY = (8, 0)  # vLLM's documents; older GPUs get no batch-invariant matrix multiplication, and no error


def examined(verl: Path | None, overrides: Sequence[str]) -> Tree:
    """Return the tree in the folder ``verl``, or the installed one, on which a job has these ``overrides``.

    Raises:
        Refused: this Python lacks a package that the doctor needs for it.
    """
    tree = identify_tree(verl or installed_tree(VERL))
    if lacking := missing(tree.root):
        install = f"{sys.executable} -m pip install {' '.join(each.split()[0] for each in lacking)}"
        command = f"make doctor VERL={shlex.quote(str(tree.root))} PYTHON=/path/to/python3"
        if overrides:
            command += f" ARGS={shlex.quote(' '.join(map(in_double_quotes, overrides)))}"
        raise Refused(f"{sys.executable} lacks {', '.join(lacking)}: {install}, or give another Python: {command}")
    return tree


def in_double_quotes(word: str) -> str:
    """Return a word of ARGS, in quotation marks if a shell would split or change it: those around ARGS are single."""
    escaped = re.sub(r'(["\\])', r"\\\1", word)
    return f'"{escaped}"' if re.search(r"""[\s"'\\]""", word) else word


def hop_table(hops: Mapping[str, Hop]) -> str:
    rows = [("hop", "requested", "effective", "because")]
    for name, (dtype, reason, requested) in hops.items():
        rows.append((name, ", ".join(map(str, requested.values())) or "-", dtype or "-", reason))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def hardware_lines(gpus: tuple[Gpu, ...], hops: Mapping[str, Hop], deterministic: bool) -> list[str]:
    """Return a line for each kind of GPU: what it computes natively, and which of the job's dtypes it emulates."""
    in_bf16 = [name for name in COMPUTING if hops[name].effective_dtype == "bfloat16"]
    lines = []
    for gpu, count in Counter(gpus).items():
        line = f"{f'{count} x ' if count > 1 else ''}{gpu}: fp16 and fp32 native, bf16 "
        line += "native" if gpu.bf16 else "emulated in fp32"
        if in_bf16 and not gpu.bf16:
            line += f"; {', '.join(in_bf16)} in bf16, which is slow there, and vLLM refuses it: +precision=fp16"
        if deterministic and gpu.capability < LEAST_CAPABILITY:
            line += "; vLLM has batch-invariant kernels from sm80 on"
        lines.append(line + ("" if gpu.kernels else f"; the torch of this Python has no kernels for it: {GUIDE}"))
    return lines


def text(diagnosis: Diagnosis, gpus: tuple[Gpu, ...] = ()) -> str:
    """Return the diagnosis as text: a table of the hops, the scalers, the findings and the verdict."""
    tree = diagnosis.tree
    parts = [f"{tree.name}, {tree.status}" + (f", stack {tree.stack}" if tree.stack else "") + f", in {tree.root}"]
    parts += [tree.advice] if tree.advice else []
    parts += [] if diagnosis.refused else [hop_table(diagnosis.hops)]
    lines = hardware_lines(gpus, diagnosis.hops, diagnosis.deterministic.get("rollout", False))
    return with_findings(parts, [f"hardware: {line}" for line in lines], diagnosis.json())


def live_text(diagnosis: Mapping) -> str:
    """Return the diagnosis of a running job as text."""
    code = "; ".join(f"verl {each['release']}, stack {each['stack']}" for each in diagnosis["verl"])
    width = max(map(len, diagnosis["hops"]))
    hops = "\n".join(f"{hop.ljust(width)}  {dtype or '-'}" for hop, dtype in diagnosis["hops"].items())
    return with_findings([f"{code}, running", hops], [], diagnosis)


def with_findings(parts: list[str], details: list[str], diagnosis: Mapping) -> str:
    """Return paragraphs: the parts, the loss scalers, the details, the findings with their fixes, the verdict."""
    scalers = []
    for role, settings in diagnosis["scaler"].items():
        if settings:
            values = ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
            scalers.append(f"loss scaler of the {role}: {values}")
    findings = [f"{Finding(**each).sentence}\n  fix: {each['fix']}" for each in diagnosis["findings"]]
    verdict = f"{diagnosis['verdict']}: {diagnosis['sentence']}"
    return spelled("\n\n".join([*parts, *scalers, *details, *findings, verdict]))


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line. Return its options, and the overrides, those of --args first.

    Raises:
        Refused: an option is unknown or lacks its value, or a quotation mark is not closed.
    """
    parser = Parser("verl-precision doctor", __doc__)
    parser.add_argument("--verl", type=folder, metavar="DIR", help="a checkout, an unpacked release or site-packages")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--live", action="store_true", help="query running workers: of RAY_ADDRESS, or on this machine")
    parser.add_argument("--config-name", default="ppo_trainer", metavar="NAME", help="main_ppo's --config-name")
    parser.add_argument("--args", default="", metavar="WORDS", help="further overrides in one string, as of make")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="an override of main_ppo")
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.removeprefix("--").partition("=")
        if word == "--":
            break
        if word.startswith("--") and name in GROUPS:
            raise Refused(f"'{word}' is not an option of this command, but a group: give +{name}={value or following}")
    options = parser.parse_overrides(words)
    return options, [*shell_words("ARGS", options.args), *options.overrides]


def main(words: list[str]) -> int:
    args, overrides = parse(words)
    if args.live:
        check_packages(("torch", "ray"))
        from verl_precision.doctor.live import diagnose_live, query_job

        static = diagnose(examined(args.verl, overrides), overrides, args.config_name).json() if overrides else None
        if static and static["refused"]:
            raise Refused(f"--live: no job can run this config: {static['refused']}")
        found = diagnose_live(*query_job(), HOPS, static)
    else:
        gpus = find_gpus() if gpu_present() and package_folder("torch") else ()
        diagnosis = diagnose(examined(args.verl, overrides), overrides, args.config_name)
        found = diagnosis.json(gpus)
    if args.json:
        print(spelled(json.dumps(found, indent=2)))
    else:
        print(live_text(found) if args.live else text(diagnosis, gpus))
    return 0 if found["verdict"] in SOUND else 1
