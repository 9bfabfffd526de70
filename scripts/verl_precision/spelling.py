"""The two spellings of a command: ``make run STEPS=8`` and ``verl-precision run --steps 8``.

Code and messages use make's. ``make`` translates its variables with ``arguments``, and ``spelled`` translates messages
for those who started the command line themselves.
"""

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from verl_precision.errors import Refused
from verl_precision.paths import PACKAGE
from verl_precision.words import one_of, option, shell_words

MADE = "VERL_PRECISION_MAKE"  # set in what make starts


class MakeTarget(NamedTuple):
    """A target of the Makefile that takes variables."""

    command: str = ""  # if it does not start the command of its name: another one, or Python's -m with a module
    takes: tuple[str, ...] | None = None  # its variables in the order of the command's arguments; None: its VARIABLES
    environment: bool = True  # whether it runs in .venv or .venv-cuda


WITH_VARIABLES = ("run", "submit", "preflight", "probe", "recommend", "plan-memory", "compare", "report")
TARGETS = {
    **dict.fromkeys((*WITH_VARIABLES, "verify-gpu", "check-kernels", "trace-update"), MakeTarget()),
    **dict.fromkeys(("sanity", "collapse"), MakeTarget("compare")),
    "doctor": MakeTarget(takes=("VERL", "ARGS")),
    **dict.fromkeys(("bench", "bench-amp"), MakeTarget(takes=("ARGS",))),
    "pr-branch": MakeTarget(takes=("VERL", "DIR")),
    "setup": MakeTarget(takes=()),
    "try-stack": MakeTarget(takes=("ARGS",), environment=False),
    "mutants": MakeTarget("-m mutants.__main__", ("ONLY",)),
    "gsm8k": MakeTarget("-m recipes.gsm8k.prepare --out data/gsm8k", ()),
    "dapo-math": MakeTarget("-m recipes.dapo_math.prepare --out data/dapo-math", ()),
    "sanity-math": MakeTarget("-m recipes.sanity_math.prepare --out data/sanity-math", ()),
    "apply-patches": MakeTarget("apply", ("FIXES", "VERL", "OAT"), environment=False),
    "unapply-patches": MakeTarget("unapply", ("FORCE", "VERL", "OAT"), environment=False),
    **dict.fromkeys(("status", "drift"), MakeTarget(takes=("VERL", "OAT"), environment=False)),
    "port": MakeTarget(takes=("FRAMEWORK", "FROM", "TO", "DIR"), environment=False),
    "check": MakeTarget(takes=(), environment=False),
    "matrix": MakeTarget("-m support.matrix", (), environment=False),
}
# The command of each target that acts on a tree of verl or OAT.
PATCHING = {name: target.command or name for name, target in TARGETS.items() if "OAT" in (target.takes or ())}
# The targets that a command of the same settings replaces.
TRANSLATED = {*PATCHING, *(name for name, target in TARGETS.items() if not target.command)} - {"setup"}
# A target in a text, and the variables after it; a value ends before the punctuation of the sentence.
IN_TEXT = re.compile(r"make ([a-z]+(?:-[a-z]+)*)((?: [A-Z_]+=(?:'[^']*'|[^\s;,)`'\"\\]*[^\s;,.)`'\"\\]))*)")


def as_options(values: Mapping[str, str]) -> list[str]:
    """Return variables as options, those of ARGS last and as words."""
    named = [f"{option(name)}={value}" for name, value in values.items() if name != "ARGS"]
    overrides = shell_words("ARGS", values.get("ARGS", ""))
    return [*named, *(["--", *overrides] if overrides else [])]


def arguments(target: str, values: Mapping[str, str], framework: bool = True) -> list[str]:
    """Return the arguments of the command line that a target of make with these variables stands for.

    Refuses variables that contradict each other, and the lack of one that the target needs. ``framework``: whether to
    name the framework of a tree, which in a message the tree shows.
    """
    trees = [name for name in ("VERL", "OAT") if name in values]
    if len(trees) == 2:
        raise Refused(f"VERL={values['VERL']} OAT={values['OAT']}: set only one of the two")
    for name in trees:
        if not values[name]:
            raise Refused(f"{name}= is empty: it must be a folder that contains {name.lower()}/")
    command, takes, _ = TARGETS[target]
    words = (command or target).split()
    if takes is None or target == "doctor":
        return [*words, *as_options(values)]
    if target == "port":
        for name in ("FROM", "TO"):
            if not values.get(name):
                raise Refused(f"{name}: is not set; example: make port FROM=0.9.1 TO=0.9.2")
        source = one_of(values, "FRAMEWORK", ["verl", "oat"], "verl")
        made = f"outputs/{source}-{Path(values['TO']).name}"
        values = {"DIR": made} | {name: each for name, each in values.items() if each}
    for name in takes:
        if not (value := values.get(name)):
            continue
        if name in ("FIXES", "FORCE"):
            words += [option(name)] if one_of(values, name, ["yes", "no"], "no") == "yes" else []
        elif name == "ARGS":
            words += shell_words(name, value)
        elif name == "FRAMEWORK" or name == "DIR" and target == "pr-branch":
            words += [option(name), value]
        elif name in trees and target in PATCHING and framework:
            words += ["--framework", name.lower(), value]
        else:
            words.append(value)
    return words


def spelled(text: str, variables: Iterable[str] = ()) -> str:
    """Return a text, about a command that has these ``variables``, in the spelling of whoever started this process."""
    if MADE in os.environ:
        return text

    def command(found: re.Match[str]) -> str:
        values = dict(word.partition("=")[::2] for word in shlex.split(found[2]))
        python = values.pop("PYTHON", "")
        try:
            if found[1] not in TRANSLATED:
                return found[0]
            parts = arguments(found[1], values, framework=False) if values else [PATCHING.get(found[1], found[1])]
        except Refused:  # it is no command, but a text that looks like one
            return found[0]
        program = [python, str(PACKAGE)] if python else ["verl-precision"]
        return " ".join([*program, *(shlex.quote(part) if " " in part else part for part in parts)])

    text = IN_TEXT.sub(command, text)
    text = re.sub(r"(?<![\w/'-])(FIXES|FORCE)=yes\b", lambda found: option(found[1]), text)
    if names := "|".join(name for name in variables if name != "ARGS"):
        text = re.sub(rf"(?<![\w/.'-])({names})=", lambda found: f"{option(found[1])} ", text)
        text = re.sub(rf"^({names}): ", lambda found: f"{option(found[1])}: ", text)
    return re.sub(r"(?<![\w/'-])ARGS(?:=(?!')|: )", "", text) if "ARGS" in variables else text
