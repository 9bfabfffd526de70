"""Parse the words of a command: options of the command line, and ``NAME=VALUE``, which stands for ``--name VALUE``.

Needs only the standard library of Python 3.10: ``make`` refuses bad words before it installs anything. Each function
that returns the value of a variable raises ``Refused``, whose message begins with ``NAME=VALUE``, if it is not allowed.
"""

import argparse
import difflib
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from verl_precision.errors import Refused
from verl_precision.paths import CONFIGS

OVERRIDE = re.compile(r"~[^=\s]+|\+{0,2}[^=\s~+-][^=\s]*=")  # the beginning of a Hydra override


class Parser(argparse.ArgumentParser):
    """A parser whose errors are refusals, which takes no abbreviated option and keeps its description's lines."""

    def __init__(self, prog: str, description: str | None) -> None:
        formatter = lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28)
        super().__init__(prog, description=description, formatter_class=formatter, allow_abbrev=False)

    def parse_overrides(self, words: list[str]) -> argparse.Namespace:
        """Parse the words of a command that takes ``overrides``; every word after ``--`` is one."""
        place = words.index("--") if "--" in words else len(words)
        parsed = self.parse_intermixed_args(words[:place])
        parsed.overrides += words[place + 1 :]
        return parsed

    def error(self, message: str) -> NoReturn:
        kind, _, words = message.partition(": ")
        if kind != "unrecognized arguments":
            raise Refused(f"{message}; --help lists the options")
        word = words.split()[0]
        near = difflib.get_close_matches(word.partition("=")[0], self._option_string_actions.keys() - {"--help"}, n=1)
        what = "option" if word.startswith("-") else "argument"
        hint = f"did you mean {near[0]}? " if near and what == "option" else ""
        raise Refused(f"'{word}' is not an {what} of this command; {hint}--help lists them")


def folder(text: str) -> Path:
    """Return a path, and refuse an empty text, which an unset variable gives."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a folder")
    return Path(text)


def option(name: str) -> str:
    """Return the option that sets a variable: ``--python-version`` of PYTHON_VERSION."""
    return f"--{name.lower().replace('_', '-')}"


def options(group: str) -> list[str]:
    """Return the names that ``+group=`` takes from ``configs/``."""
    return sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))


def alternatives(word: str, allowed: Iterable[str], kind: str) -> str:
    """Return the end of a refusal: the nearest to ``word``, if there is one, and all that are allowed."""
    names = list(allowed)
    nearest = difflib.get_close_matches(word, names, n=1)
    return f"{f'did you mean {nearest[0]}? The' if nearest else 'the'} {kind} are {', '.join(names)}"


def parse_words(words: Iterable[str], variables: Iterable[str]) -> dict[str, str]:
    """Return the values of ``NAME=VALUE`` words by name, or refuse a name; an empty value counts as not set."""
    values = dict(word.partition("=")[::2] for word in words)
    names = list(variables)
    for name in values:
        if name not in names:
            near = alternatives(name.upper(), names, "variables")
            raise Refused(f"{name}: is not a variable of this command; {near}")
    return {name: value for name, value in values.items() if value}


def shell_words(name: str, value: str, advice: str = "") -> list[str]:
    """Split a value into words as a shell does. A refusal ends with ``advice``."""
    try:
        return shlex.split(value)
    except ValueError as error:
        raise Refused(f"{name}={value}: {error}{advice}") from error


def override_words(name: str, value: str, advice: str = "") -> list[str]:
    words = shell_words(name, value, advice)
    for word in words:
        if not OVERRIDE.match(word):
            raise Refused(f"{name}={word}: is not a Hydra override; it must be KEY=VALUE, +KEY=VALUE or ~KEY{advice}")
    return words


def one_of(values: Mapping[str, str], name: str, allowed: list[str], default: str) -> str:
    value = values.get(name, default)
    if value not in allowed:
        raise Refused(f"{name}={value}: must be one of {', '.join(allowed)}")
    return value


def some_of(values: Mapping[str, str], name: str, allowed: list[str], default: str | None = None) -> tuple[str, ...]:
    """Return the words of a variable that takes some of ``allowed``, each once; all by default."""
    words = values.get(name, " ".join(allowed) if default is None else default).split()
    for word in words:
        if word not in allowed:
            raise Refused(f"{name}={word}: must be one of {', '.join(allowed)}, or several, separated by spaces")
    return tuple(dict.fromkeys(words))


def whole_number(values: Mapping[str, str], name: str, least: int, default: int | None) -> int | None:
    value = values.get(name, default)
    if value is not None and not (str(value).isdecimal() and int(value) >= least):
        raise Refused(f"{name}={value}: must be a whole number of at least {least}")
    return value if value is None else int(value)


def finite_number(values: Mapping[str, str], name: str, default: float, above: float = -math.inf) -> float:
    try:
        value = float(values.get(name, default))
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= above:
        raise Refused(f"{name}={values[name]}: must be a number{f' above {above:g}' if math.isfinite(above) else ''}")
    return value


def gpu_present() -> bool:
    """Return whether nvidia-smi lists a GPU of this machine."""
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True).returncode == 0


def device(values: Mapping[str, str]) -> str:
    """Return DEVICE. cuda without a GPU is refused, unless RAY_ADDRESS names a cluster whose nodes may have some."""
    chosen = one_of(values, "DEVICE", ["cpu", "cuda"], "cuda" if gpu_present() else "cpu")
    if chosen == "cuda" and not gpu_present() and not os.environ.get("RAY_ADDRESS"):
        raise Refused("DEVICE=cuda: nvidia-smi finds no GPU here; use DEVICE=cpu")
    return chosen


def file_path(values: Mapping[str, str], name: str) -> str | None:
    """Return the absolute path of a file or folder that may not exist yet."""
    return str(Path(values[name]).expanduser().resolve()) if name in values else None


def parquet_path(values: Mapping[str, str], name: str) -> str | None:
    """Return the absolute path of a parquet file, which begins with ``PAR1``."""
    path, start = file_path(values, name), b""
    if path and Path(path).is_file():
        with Path(path).open("rb") as file:
            start = file.read(4)
    if path and start != b"PAR1":
        raise Refused(f"{name}={values[name]}: is not a readable parquet file")
    return path


def model_path(value: str) -> str:
    """Return the absolute path of a model's folder, or the name of a model on the Hugging Face Hub unchanged."""
    path = Path(value).expanduser()
    if (path / "config.json").exists():
        return str(path.resolve())
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", value) and not path.parent.exists():
        return value
    raise Refused(f"MODEL={value}: contains no config.json; give a model's folder or a name on the Hub (owner/name)")
