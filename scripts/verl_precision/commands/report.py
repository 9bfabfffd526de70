"""Rebuild a report from the runs that it keeps.

Reads FROM/report.json and the runs that it names, and writes the page, the figures, the tables and the runs to OUT. OUT
may be FROM; by default it is outputs/report/NAME, where NAME is the last part of FROM.

Exit code 0: done; 1: refused; 130: interrupted, with OUT as it was.
"""

from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.report.build import rebuild
from verl_precision.report.render import on_screen
from verl_precision.words import parse_words

VARIABLES = {
    "FROM": "a report's folder, with report.json, e.g. outputs/compare/arithmetic/grpo/report",
    "OUT": "the folder of the new report, default outputs/report/NAME",
}


def parse(words: list[str]) -> dict[str, str]:
    values = parse_words(words, VARIABLES)
    if "FROM" not in values:
        raise Refused("FROM: is not set; give a report's folder, e.g. FROM=outputs/compare/arithmetic/grpo/report")
    return values


def main(values: dict[str, str]) -> int:
    source = Path(values["FROM"]).expanduser()
    out = Path(values.get("OUT", Path("outputs/report") / source.resolve().name)).expanduser()
    print(f"\n{on_screen(rebuild(source, out))}\n\n  {out / 'index.html'}\n")
    return 0
