"""Read a recipe's config, a dataclass, from the command line, the environment and a YAML file; write its records."""

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, NoReturn, Optional, TypeVar

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

Config = TypeVar("Config")
METRICS = "metrics.jsonl"
FLAGS = {"1": True, "true": True, "0": False, "false": False}
RULES = {
    "at least 0": lambda value: 0 <= value < math.inf,
    "at least 1": lambda value: value >= 1,
    "positive": lambda value: 0 < value < math.inf,
    "between 0 and 1": lambda value: 0 <= value <= 1,
    "from 0 to 2147483647": lambda value: 0 <= value < 2**31,
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


def check_values(config: Any, rules: Mapping[str, tuple[bool, str]]) -> None:
    """Check a config by the rules of its options, then by ``rules``: whether a key's is met, and what it allows."""
    allowed = {each.name: each.metadata.get("allowed") for each in fields(config)}
    named = {key: (RULES[name](getattr(config, key)), name) for key, name in allowed.items() if name}
    for key, (met, name) in [*named.items(), *rules.items()]:
        if not met:
            raise ValueError(f"{key}={getattr(config, key)} must be {name}")


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
    """Return the folder of a run with an empty metrics.jsonl; raise ``ValueError`` if it has one or is unusable."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METRICS).touch(exist_ok=False)
    except OSError as error:
        raise ValueError(f"out={out} must be a writable folder without results: {error}") from None
    return folder


def append_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Append a line to metrics.jsonl; NaN and infinity, which JSON does not have, become null."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    with (folder / METRICS).open("a") as file:
        file.write(json.dumps(plain, allow_nan=False) + "\n")


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with exit code 1."""

    def error(self, message: str) -> NoReturn:
        sys.exit(f"{self.prog}: {' '.join(message.split())}")


def parse_config(
    config: type[Config], program: str, description: str, words: Optional[Sequence[str]] = None
) -> tuple[Config, dict[str, str]]:
    """Return a config, and the source of each of its values: command line over environment over YAML file over default.

    ``config`` is a dataclass of int, float, str and bool fields, made by :func:`option`, with a field ``out`` that must
    be set. Every field is an option, ``total_steps`` as ``--total-steps``; switches have ``--no-…`` too; ``--config``
    names the file. A refused value, from any source, ends the process with one line and exit code 1. From here on a
    warning, too, is one line, without the line of source that Python adds.
    """
    warnings.formatwarning = lambda message, *_, **__: f"{program}: {message}\n"
    settings = {"argument_default": argparse.SUPPRESS, "allow_abbrev": False}
    parser = OneLineParser(prog=program, description=description, **settings)
    parser.add_argument("--config", metavar="FILE", help="YAML file of these options, with _ instead of -")
    for each in fields(config):
        boolean = {"action": argparse.BooleanOptionalAction}
        how = boolean if each.type is bool else {"type": each.type, "metavar": each.type.__name__}
        default = f" ({each.default})" if each.default != "" else ""
        parser.add_argument(f"--{each.name.replace('_', '-')}", help=each.metadata["help"] + default, **how)
    typed = vars(parser.parse_args(words))
    path = typed.pop("config", None)
    variables = {each.name: each.metadata["variable"] for each in fields(config) if each.metadata["variable"]}
    try:
        read = OmegaConf.to_container(OmegaConf.load(path), throw_on_missing=True) if path else {}
        environment = {name: environment_flag(variable) for name, variable in variables.items()}
        environment = {name: value for name, value in environment.items() if value is not None}
        merged = OmegaConf.merge(OmegaConf.structured(config), read)  # checks the file's names and types
        chosen = config(**{**merged, **environment, **typed})
    except (OSError, yaml.YAMLError, OmegaConfBaseException, OverflowError) as error:
        parser.error(f"--config {path}: {error}")
    except ValueError as error:
        parser.error(str(error))
    if not chosen.out:
        parser.error("--out is missing: give a folder for the results")
    sources = dict.fromkeys((each.name for each in fields(config)), "default") | dict.fromkeys(read, f"config ({path})")
    sources |= {name: f"environment ({variables[name]})" for name in environment}
    return chosen, sources | dict.fromkeys(typed, "command line")
