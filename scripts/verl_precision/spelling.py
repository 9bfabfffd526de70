"""The two spellings of a command's settings: ``--name VALUE`` on the command line, ``NAME=VALUE`` for make.

Code and messages use make's. ``make`` translates its variables with ``arguments``, and ``spelled`` translates messages
for those who started the command line themselves.
"""

import argparse
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.paths import PACKAGE
from verl_precision.words import GROUPS, one_of, options, shell_words

MADE = "VERL_PRECISION_MAKE"  # set in what make starts
EXAMPLES = {"port": "FROM=0.9.1 TO=0.9.2", "carry": "PATCH=fsdp-compute-in-the-configured-dtype FROM=0.9.1"}
PATCHING = {"apply-patches": "apply", "unapply-patches": "unapply", "status": "status", "drift": "drift"}
IN_TEXT = re.compile(r"make ([a-z]+(?:-[a-z]+)*)((?: [A-Z_]+=(?:'[^']*'|[^\s;,)`'\"\\]*[^\s;,.)`'\"\\]))*)")
TARGETS = (*PATCHING, "port", "carry", "check", "doctor", "probe", "preflight", "recommend", "plan-memory", "compare")
TARGETS += ("report", "collapse", "run", "submit", "bench", "bench-amp", "verify-gpu", "wheelhouse", "mutants")


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
    """Return the variables that the options of ``add_options`` set.

    Raises:
        Refused: a variable is written as make takes it.
    """
    values = {name: getattr(parsed, name) for name in variables if getattr(parsed, name)}
    overrides = getattr(parsed, "overrides", [])  # of a command that takes ARGS
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


def tree(values: Mapping[str, str]) -> list[str]:
    """Return the arguments that name the tree of VERL or OAT; none if neither is set.

    Raises:
        Refused: both are set, or one is empty.
    """
    if "VERL" in values and "OAT" in values:
        raise Refused(f"VERL={values['VERL']} OAT={values['OAT']}: set only one of the two")
    if not {"VERL", "OAT"} & set(values):
        return []
    name = "OAT" if "OAT" in values else "VERL"
    if not values[name]:
        raise Refused(f"{name}= is empty: it must be a folder that contains {name.lower()}/")
    return ["--framework", name.lower(), values[name]]


def flag(values: Mapping[str, str], name: str) -> list[str]:
    """Return the option of a variable that is yes or no."""
    return [option(name)] if one_of(values, name, ["yes", "no"], "no") == "yes" else []


def arguments(target: str, values: Mapping[str, str]) -> list[str]:
    """Return the arguments of the command line that a target of make with these variables stands for.

    Raises:
        Refused: one that the target needs is not set, or they contradict each other.
    """
    if target in PATCHING:
        fixes = flag(values, "FIXES")
        if fixes and "OAT" in values:
            raise Refused("FIXES=yes: OAT has one series of patches; leave FIXES out")
        return [PATCHING[target], *fixes, *flag(values, "FORCE"), *tree(values)]
    if target in EXAMPLES:
        first, second = (part.partition("=")[0] for part in EXAMPLES[target].split())
        for name in (first, second):
            if not values.get(name):
                raise Refused(f"{name}: is not set; example: make {target} {EXAMPLES[target]}")
        framework = one_of(values, "FRAMEWORK", ["verl", "oat"], "verl")
        named = f"{framework}-{Path(values['TO']).name}" if target == "port" else values["PATCH"].removesuffix(".patch")
        folder = values.get("DIR") or f"outputs/{'' if target == 'port' else 'carry-'}{named}"
        choice = ["--framework", framework] if framework != "verl" else []
        return [target, *choice, values[first], values[second], folder]
    if target == "pr-branch":
        return [target, *tree(values)[2:], "--dir", values.get("DIR") or "outputs/pr-branch"]
    if target == "mutants":
        return [target, *filter(None, [values.get("ONLY")])]
    if target in ("bench", "bench-amp"):
        return [target, *shell_words("ARGS", values.get("ARGS", ""))]
    return [target, *as_options(values)]


def spelled(text: str, variables: Iterable[str] = ()) -> str:
    """Return a text in the spelling of whoever started this process.

    Args:
        variables: of the command that ``text`` is about.
    """
    if MADE in os.environ:
        return text

    def command(found: re.Match[str]) -> str:
        target = found[1]
        if target not in TARGETS:
            return found[0]
        values = dict(word.partition("=")[::2] for word in shlex.split(found[2]))
        python = values.pop("PYTHON", "")
        try:
            parts = without_framework(arguments(target, values)) if values else [PATCHING.get(target, target)]
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


def without_framework(words: list[str]) -> list[str]:
    """Return a patch command without ``--framework``, because the tree shows it."""
    place = words.index("--framework") if "--framework" in words and words[0] in PATCHING.values() else None
    return words if place is None else words[:place] + words[place + 2 :]
