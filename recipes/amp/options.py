"""Parse a recipe's config, a dataclass, from the command line, the environment and a YAML file."""

import argparse
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, Optional, TypeVar, get_args

import torch
import yaml

Config = TypeVar("Config")
_FLAGS = {"1": True, "true": True, "0": False, "false": False}


def option(default: Any, text: str, variable: Optional[str] = None) -> Any:
    """Return a field of a config.

    Args:
        text: the line that ``--help`` shows.
        variable: an environment variable that sets a switch unless the command line does.
    """
    return field(default=default, metadata={"help": text, "variable": variable})


def flag(name: str) -> Optional[bool]:
    """Return the environment variable ``name`` as a switch; ``None`` where it is not set.

    Raises:
        ValueError: it is set to anything but 1, 0, true or false.
    """
    value = os.environ.get(name)
    if value is None:
        return None
    if value.lower() not in _FLAGS:
        raise ValueError(f"{name}={value!r} in the environment must be 1, 0, true or false; unset it to leave it open")
    return _FLAGS[value.lower()]


def within(config: Any, rules: Mapping[str, tuple[bool, str]]) -> None:
    """Refuse a config's first value that breaks its rule.

    Args:
        rules: ``{key: (whether the value is allowed, what is allowed)}``.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """
    for key, (valid, allowed) in rules.items():
        if not valid:
            raise ValueError(f"{key}={getattr(config, key)} must be {allowed}")


def device(name: str) -> tuple[torch.device, bool]:
    """Return the device of ``name``, and whether to compute in 16 bits on a CPU: only where ``name`` is "cpu".

    Args:
        name: "cpu", "cuda", or "auto": CUDA if there is one.

    Raises:
        ValueError: another name; CUDA where there is none.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={name} must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda must be auto or cpu: there is no CUDA device here")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu"), False
    return torch.device(name), name == "cpu"


def new_folder(out: str | os.PathLike) -> Path:
    """Return the folder of a run, created if need be.

    Raises:
        ValueError: another run's ``metrics.jsonl`` is in it, or it cannot be made or written to.
    """
    folder = Path(out)
    try:
        taken = (folder / "metrics.jsonl").exists()
        if not taken:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"out={out} must be a writable folder: {error.strerror}") from None
    if taken:
        raise ValueError(
            f"out={out} must be a folder without results: it has metrics.jsonl of another run; choose another folder"
        )
    return folder


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record for JSON, which has no NaN or infinity: such a number becomes ``None``."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


class _OneLine(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.exit(f"{self.prog}: {message}")


def parse(
    config: type[Config], program: str, description: str, words: Optional[Sequence[str]] = None
) -> tuple[Config, dict[str, str]]:
    """Return a config, and who set each of its values: command line over environment over YAML file over default.

    Every field is an option, ``total_steps`` as ``--total-steps``; switches have ``--no-…`` too; ``--config`` names the
    file. A refused value, from any source, ends the process with one line and exit code 1. From here on a warning,
    too, is one line, without the line of source that Python adds.

    Args:
        config: a dataclass of int, float, str and bool fields, or ``Optional`` of one, made by :func:`option`.

    Returns:
        the config, and who set each field: "command line", "environment (VARIABLE)", "config (FILE)" or "default".
    """
    warnings.formatwarning = lambda message, *_, **__: f"{program}: {message}\n"
    parser = _OneLine(prog=program, description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of these options, with _ instead of -")
    for each in fields(config):
        kind = next((kind for kind in get_args(each.type) if kind is not type(None)), each.type)
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind, "metavar": kind.__name__}
        default = "" if each.default is None else f" ({each.default})"
        parser.add_argument(f"--{each.name.replace('_', '-')}", help=each.metadata["help"] + default, **how)
    parsed, unknown = parser.parse_known_args(words)
    if unknown:
        near = get_close_matches(unknown[0].partition("=")[0], parser._option_string_actions)
        hint = f"did you mean {' or '.join(near)}?" if near else "see --help"
        parser.error(f"{unknown[0]} is not an option; {hint}")
    typed = vars(parsed)
    path = typed.pop("config", None)
    try:
        variables = {each.name: each.metadata["variable"] for each in fields(config) if each.metadata["variable"]}
        environment = {name: flag(variable) for name, variable in variables.items()}
        environment = {name: value for name, value in environment.items() if value is not None}
        read = _read(path, config)
        chosen = config(**{**read, **environment, **typed})
    except ValueError as error:
        parser.error(str(error))
    sources = dict.fromkeys((each.name for each in fields(config)), "default")
    sources |= dict.fromkeys(read, f"config ({path})")
    sources |= {name: f"environment ({variables[name]})" for name in environment}
    return chosen, sources | dict.fromkeys(typed, "command line")


def _read(path: Optional[Path], config: type) -> dict[str, Any]:
    """Return a YAML file's values, after a check of their names and types."""
    if path is None:
        return {}
    try:
        read = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"--config {path}: must be YAML: {' '.join(str(error).split())}") from None
    kinds = {each.name: each.type for each in fields(config)}
    if not isinstance(read, dict):
        raise ValueError(f"--config {path}: must be a mapping of {', '.join(kinds)}")
    for key, value in read.items():
        if key not in kinds:
            near = get_close_matches(str(key), kinds) or kinds
            raise ValueError(f"--config {path}: {key} is not an option; choose from {', '.join(near)}")
        allowed = get_args(kinds[key]) or (kinds[key],)
        fits = float in allowed and type(value) is int and abs(value) < 2**63
        if type(value) not in allowed and not fits:
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
            hint = " (YAML needs the dot in 3.0e-4)" if float in allowed and isinstance(value, str) else ""
            raise ValueError(f"--config {path}: {key}={value!r} must be {names}{hint}")
    return read
