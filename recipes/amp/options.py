"""Read a recipe's config, a dataclass, from the command line, the environment and a YAML file."""

import argparse
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, NoReturn, Optional, TypeVar, get_args

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

Config = TypeVar("Config")
Rule = tuple[Callable[[Any], bool], str]  # whether a value is allowed, and what is allowed, for a message
FLAGS = {"1": True, "true": True, "0": False, "false": False}
RULES: dict[str, Callable[[Any], bool]] = {
    "at least 0": lambda value: 0 <= value < math.inf,
    "at least 1": lambda value: value >= 1,
    "positive": lambda value: 0 < value < math.inf,
    "between 0 and 1": lambda value: 0 <= value <= 1,
    "from 0 to 2147483647": lambda value: 0 <= value < 2**31,
    "a folder: --out DIR": bool,
}


def option(default: Any, text: str, allowed: Optional[str] = None, variable: Optional[str] = None) -> Any:
    """Return a field of a config: its line in ``--help``, the name of its rule, the variable that also sets it."""
    return field(default=default, metadata={"help": text, "allowed": allowed, "variable": variable})


def environment_flag(name: str) -> Optional[bool]:
    """Return the environment variable ``name`` as a switch; ``None`` where it is not set."""
    value = os.environ.get(name)
    if value is not None and value.lower() not in FLAGS:
        raise ValueError(f"{name}={value!r} in the environment must be 1, 0, true or false; unset it to leave it open")
    return None if value is None else FLAGS[value.lower()]


def check_values(config: Any, rules: Mapping[str, Rule]) -> None:
    """Check a config's values by the rules of their options, then by ``rules``; raise ``ValueError``."""
    named = {each.name: each.metadata["allowed"] for each in fields(config) if each.metadata.get("allowed")}
    for key, (valid, allowed) in [*((key, (RULES[name], name)) for key, name in named.items()), *rules.items()]:
        if not valid(getattr(config, key)):
            raise ValueError(f"{key}={getattr(config, key)} must be {allowed}")


def resolve_device(name: str) -> tuple[torch.device, bool]:
    """Return the device of "auto", "cpu" or "cuda", and whether to compute in 16 bits on a CPU: only for "cpu"."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={name} must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda must be auto or cpu: there is no CUDA device here")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu"), False
    return torch.device(name), name == "cpu"


def new_folder(out: str | os.PathLike) -> Path:
    """Return the folder of a run, created if needed; raise ``ValueError`` if it is unusable or has a run's results."""
    folder = Path(out)
    try:
        if not (taken := (folder / "metrics.jsonl").exists()):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"out={out} must be a writable folder: {error.strerror}") from None
    if taken:
        raise ValueError(f"out={out} must be a folder without results: it has metrics.jsonl of another run")
    return folder


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record for JSON, which has no NaN or infinity: such a number becomes ``None``."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with exit code 1."""

    def error(self, message: str) -> NoReturn:
        sys.exit(f"{self.prog}: {' '.join(message.split())}")


def parse_config(
    config: type[Config], program: str, description: str, words: Optional[Sequence[str]] = None
) -> tuple[Config, dict[str, str]]:
    """Return a config, and the source of each of its values: command line over environment over YAML file over default.

    ``config`` is a dataclass of int, float, str and bool fields, or ``Optional`` of one, made by :func:`option`. Every
    field is an option, ``total_steps`` as ``--total-steps``; switches have ``--no-…`` too; ``--config`` names the file.
    A refused value, from any source, ends the process with one line and exit code 1. From here on a warning, too, is
    one line, without the line of source that Python adds.
    """
    warnings.formatwarning = lambda message, *_, **__: f"{program}: {message}\n"
    settings = {"argument_default": argparse.SUPPRESS, "allow_abbrev": False}
    parser = OneLineParser(prog=program, description=description, **settings)
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of these options, with _ instead of -")
    for each in fields(config):
        kind = next((kind for kind in get_args(each.type) if kind is not type(None)), each.type)
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind, "metavar": kind.__name__}
        default = "" if each.default is None else f" ({each.default})"
        parser.add_argument(f"--{each.name.replace('_', '-')}", help=each.metadata["help"] + default, **how)
    typed = vars(parser.parse_args(words))
    path = typed.pop("config", None)
    variables = {each.name: each.metadata["variable"] for each in fields(config) if each.metadata["variable"]}
    try:
        read = OmegaConf.load(path) if path else {}
        environment = {name: environment_flag(variable) for name, variable in variables.items()}
        environment = {name: value for name, value in environment.items() if value is not None}
        merged = OmegaConf.merge(OmegaConf.structured(config), read)  # checks the file's names and types
        if missing := OmegaConf.missing_keys(read) if path else ():
            raise ValueError(f"--config {path}: {', '.join(sorted(missing))} must have a value instead of ???")
        chosen = config(**{**merged, **environment, **typed})
    except OSError as error:
        parser.error(f"--config {path}: {error.strerror}")
    except (yaml.YAMLError, OmegaConfBaseException, OverflowError) as error:
        parser.error(f"--config {path}: {error}")
    except ValueError as error:
        parser.error(str(error))
    sources = dict.fromkeys((each.name for each in fields(config)), "default") | dict.fromkeys(read, f"config ({path})")
    sources |= {name: f"environment ({variables[name]})" for name in environment}
    return chosen, sources | dict.fromkeys(typed, "command line")
