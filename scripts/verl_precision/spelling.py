"""The two spellings of a command: ``make run STEPS=8`` and ``verl-precision run --steps 8``.

Code and messages use make's. ``make`` translates its variables with ``arguments``, and ``spelled`` translates messages
for those who started the command line themselves.
"""

import argparse
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.paths import PACKAGE
from verl_precision.words import GROUPS, one_of, options, shell_words

MADE = "VERL_PRECISION_MAKE"  # set in what make starts


@dataclass(frozen=True)
class MakeTarget:
    """A target of the Makefile that takes variables."""

    command: str = ""  # if it does not start the command of its name: another one, or a module, which has a dot
    takes: tuple[str, ...] | None = None  # may also be set in the environment; None: the VARIABLES of the command
    environment: bool = True  # whether it runs in .venv or .venv-cuda


WITH_VARIABLES = ("run", "submit", "preflight", "probe", "recommend", "plan-memory", "compare", "report", "collapse")
TARGETS = {
    **dict.fromkeys((*WITH_VARIABLES, "verify-gpu"), MakeTarget()),
    "sanity": MakeTarget("compare"),
    "wheelhouse": MakeTarget(environment=False),
    "doctor": MakeTarget(takes=("ARGS", "VERL")),
    **dict.fromkeys(("bench", "bench-amp"), MakeTarget(takes=("ARGS",))),
    "pr-branch": MakeTarget(takes=("VERL", "DIR")),
    "setup": MakeTarget(takes=()),
    "mutants": MakeTarget("mutants.__main__", ("ONLY",)),
    "gsm8k": MakeTarget("recipes.gsm8k.prepare", ()),
    "dapo-math": MakeTarget("recipes.dapo_math.prepare", ()),
    "sanity-math": MakeTarget("recipes.sanity_math.prepare", ()),
    "apply-patches": MakeTarget("apply", ("VERL", "OAT", "FIXES"), environment=False),
    "unapply-patches": MakeTarget("unapply", ("VERL", "OAT", "FORCE"), environment=False),
    **dict.fromkeys(("status", "drift"), MakeTarget(takes=("VERL", "OAT"), environment=False)),
    "port": MakeTarget(takes=("FROM", "TO", "DIR", "FRAMEWORK"), environment=False),
    "carry": MakeTarget(takes=("PATCH", "FROM", "DIR", "FRAMEWORK"), environment=False),
    "check": MakeTarget(takes=(), environment=False),
    "matrix": MakeTarget("support.matrix", (), environment=False),
}
# The command of each target that acts on a tree of verl or OAT.
PATCHING = {name: target.command or name for name, target in TARGETS.items() if "OAT" in (target.takes or ())}
# The targets that a command of the same settings replaces.
TRANSLATED = {*PATCHING, *(name for name, target in TARGETS.items() if not target.command)} - {"setup"}
EXAMPLES = {"port": "FROM=0.9.1 TO=0.9.2", "carry": "PATCH=fsdp-compute-in-the-configured-dtype FROM=0.9.1"}
# A target in a text, and the variables after it; a value ends before the punctuation of the sentence.
IN_TEXT = re.compile(r"make ([a-z]+(?:-[a-z]+)*)((?: [A-Z_]+=(?:'[^']*'|[^\s;,)`'\"\\]*[^\s;,.)`'\"\\]))*)")


def option(name: str) -> str:
    """Return the option that sets a variable: ``--python-version`` of PYTHON_VERSION."""
    return f"--{name.lower().replace('_', '-')}"


def add_options(parser: argparse.ArgumentParser, variables: Mapping[str, str]) -> None:
    """Add an option for each variable, with its text as help; overrides of verl, ARGS, may also be given as words."""
    groups = {group: ", ".join(options(group)) for group in GROUPS}
    for name, text in variables.items():
        parser.add_argument(option(name), dest=name, metavar=name, help=spelled(text.format(**groups), variables))
    if "ARGS" in variables:
        what = "a further Hydra override of verl, such as trainer.save_freq=5; after -- if it looks like an option"
        parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=what)


def values_of(parsed: argparse.Namespace, variables: Iterable[str]) -> dict[str, str]:
    """Return the variables that the options of ``add_options`` set, and refuse one that is written as make takes it."""
    values = {name: getattr(parsed, name) for name in variables if getattr(parsed, name)}
    overrides = parsed.overrides if "ARGS" in variables else []
    for word in overrides:
        name, _, value = word.partition("=")
        if name in variables:
            raise Refused(f"'{word}' is a variable of make; write {option(name)} {value}")
    if overrides:
        values["ARGS"] = " ".join(filter(None, [values.get("ARGS"), shlex.join(overrides)]))
    return values


def as_options(values: Mapping[str, str]) -> list[str]:
    """Return variables as options, those of ARGS last and as words."""
    named = [f"{option(name)}={value}" for name, value in values.items() if name != "ARGS"]
    overrides = shell_words("ARGS", values.get("ARGS", ""))
    return [*named, *(["--", *overrides] if overrides else [])]


def tree(values: Mapping[str, str], framework: bool) -> list[str]:
    """Return the arguments that name the tree of VERL or OAT, and its ``framework``; none if neither is set."""
    named = [name for name in ("VERL", "OAT") if name in values]
    if len(named) == 2:
        raise Refused(f"VERL={values['VERL']} OAT={values['OAT']}: set only one of the two")
    for name in named:
        if not values[name]:
            raise Refused(f"{name}= is empty: it must be a folder that contains {name.lower()}/")
        return ["--framework", name.lower(), values[name]] if framework else [values[name]]
    return []


def flag(values: Mapping[str, str], name: str) -> list[str]:
    """Return the option of a variable that is yes or no."""
    return [option(name)] if one_of(values, name, ["yes", "no"], "no") == "yes" else []


def arguments(target: str, values: Mapping[str, str], framework: bool = True) -> list[str]:
    """Return the arguments of the command line that a target of make with these variables stands for.

    Refuses variables that contradict each other, and the lack of one that the target needs. ``framework``: whether to
    name the framework of a tree, which in a message the tree shows.
    """
    if target in PATCHING:
        fixes = flag(values, "FIXES")
        if fixes and "OAT" in values:
            raise Refused("FIXES=yes: OAT has one series of patches; leave FIXES out")
        return [PATCHING[target], *fixes, *flag(values, "FORCE"), *tree(values, framework)]
    if target in EXAMPLES:
        needed = [word.partition("=")[0] for word in EXAMPLES[target].split()]
        for name in needed:
            if not values.get(name):
                raise Refused(f"{name}: is not set; example: make {target} {EXAMPLES[target]}")
        chosen = one_of(values, "FRAMEWORK", ["verl", "oat"], "verl")
        choice = ["--framework", chosen] if chosen != "verl" else []
        if target == "port":
            default = f"outputs/{chosen}-{Path(values['TO']).name}"
        else:
            default = f"outputs/carry-{values['PATCH'].removesuffix('.patch')}"
        return [target, *choice, *(values[name] for name in needed), values.get("DIR") or default]
    if target == "pr-branch":
        return [target, *tree(values, False), "--dir", values.get("DIR") or "outputs/pr-branch"]
    if target in ("bench", "bench-amp"):
        return [target, *shell_words("ARGS", values.get("ARGS", ""))]
    tree(values, False)  # checks VERL
    return [target, *as_options(values)]


def spelled(text: str, variables: Iterable[str] = ()) -> str:
    """Return a text, about a command that has these ``variables``, in the spelling of whoever started this process."""
    if MADE in os.environ:
        return text

    def command(found: re.Match[str]) -> str:
        target = found[1]
        if target not in TRANSLATED:
            return found[0]
        values = dict(word.partition("=")[::2] for word in shlex.split(found[2]))
        python = values.pop("PYTHON", "")
        try:
            parts = arguments(target, values, framework=False) if values else [PATCHING.get(target, target)]
        except Refused:  # it is no command, but a text that looks like one
            return found[0]
        program = [python, str(PACKAGE)] if python else ["verl-precision"]
        return " ".join([*program, *(shlex.quote(part) if " " in part else part for part in parts)])

    text = IN_TEXT.sub(command, text)
    text = re.sub(r"(?<![\w/'-])(FIXES|FORCE)=yes\b", lambda found: option(found[1]), text)
    names = "|".join(name for name in variables if name != "ARGS")
    if names:
        text = re.sub(rf"(?<![\w/.'-])({names})=", lambda found: f"{option(found[1])} ", text)
        text = re.sub(rf"^({names}): ", lambda found: f"{option(found[1])}: ", text)
    return re.sub(r"(?<![\w/'-])ARGS(?:=(?!')|: )", "", text) if "ARGS" in variables else text
