"""Rebuild a report from the runs that it keeps.

Reads FROM/report.json and the runs that it names, and writes the page, the figures, the tables and the runs to OUT. OUT
may be FROM; by default it is outputs/report/NAME, where NAME is the last part of FROM.

Exit code 0: done; 1: refused; 130: interrupted, with OUT as it was.
"""

from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.report.build import rebuild
from verl_precision.report.tables import on_screen
from verl_precision.words import parse_words

VARIABLES = {
    "FROM": "a report's folder, with report.json, e.g. outputs/compare/arithmetic/grpo/report",
    "OUT": "the folder of the new report, default outputs/report/NAME",
}


def parse(words: list[str]) -> dict[str, str]:
    """Return the values of the words by name, or refuse a wrong name and a missing FROM."""
    variables = parse_words(words, VARIABLES)
    if "FROM" not in variables:
        raise Refused("FROM: is not set; give a report's folder, e.g. FROM=outputs/compare/arithmetic/grpo/report")
    return variables


def main(variables: dict[str, str]) -> int:
    source = Path(variables["FROM"]).expanduser()
    out = Path(variables.get("OUT", Path("outputs/report") / source.resolve().name)).expanduser()
    print(f"\n{on_screen(rebuild(source, out))}\n\n  {out / 'index.html'}\n")
    return 0
