"""The parser of every command's options: argparse's, whose errors are refusals that name the nearest option."""

import argparse
import difflib
from pathlib import Path
from typing import NoReturn

from verl_precision.errors import Refused


def folder(text: str) -> Path:
    """Return a path, and refuse an empty text, which an unset variable gives."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a folder")
    return Path(text)


class Parser(argparse.ArgumentParser):
    """An argument parser that refuses, takes no abbreviated option, and keeps the lines of its description."""

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
        """Raise ``Refused``; of an unknown option it names the nearest."""
        kind, _, words = message.partition(": ")
        if kind != "unrecognized arguments":
            raise Refused(f"{message}; --help lists the options")
        word = words.split()[0]
        if not word.startswith("-"):
            raise Refused(f"'{word}' is not an argument of this command; --help lists them")
        options = self._option_string_actions.keys() - {"-h", "--help"}
        near = difflib.get_close_matches(word.partition("=")[0], options, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise Refused(f"'{word}' is not an option of this command; {hint}--help lists them")
