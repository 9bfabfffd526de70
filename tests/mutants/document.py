"""Format the outcomes of all mutants as docs/reference/mutants.md."""

import re
from collections.abc import Mapping, Sequence

from mutants.table import Mutant
from mutants.trial import Outcome

HEAD = """\
# Mutants

This page lists the known defects that `make mutants` puts into the project, one at a time, and for each the first test
that fails on it. `make mutants` regenerates the page.

A mutant replaces one text of the project by a defect; `tests/mutants/AREA.toml` defines it. The test that kills it
passes without it. (stuck): one rank waited for the other forever. (no end): the tests did not end within half an hour.
A mutant that names no tests is tried against those whose imports lead to its file, the nearest first; the test that
killed it last goes before all.
"""
ROW = re.compile(r"\| ([a-z0-9-]+) \|.*\| `([^`]+)` \|")


def survived(mutant: Mutant, outcome: Outcome) -> bool:
    """Return whether a mutant lives that is not shown to be equivalent, or could not be tried."""
    return bool(outcome.problem) or not outcome.killer and not mutant.equivalent


def killers(text: str) -> dict[str, str]:
    """Return the killer of each mutant by name from a document."""
    rows = (ROW.fullmatch(line.replace("\\|", "|")) for line in text.splitlines())
    return {row[1]: f"tests/{row[2]}" for row in rows if row}


def verdict(mutant: Mutant, outcome: Outcome) -> str:
    """Return the last column of a mutant's row."""
    if outcome.problem:
        return "**not tried**"
    if outcome.killer:
        return f"`{outcome.killer.removeprefix('tests/')}`"
    return f"equivalent: {mutant.equivalent}" if mutant.equivalent else "**survived**"


def document(mutants: Sequence[Mutant], outcomes: Mapping[str, Outcome]) -> str:
    """Return the table of areas and a table of mutants for each, as Markdown."""
    areas = dict.fromkeys(mutant.area for mutant in mutants)
    lines = [HEAD, "| area | mutants | killed | equivalent | survivors |", "|---|---|---|---|---|"]
    sections = []
    total = [0, 0, 0, 0]
    for area in areas:
        of_area = [mutant for mutant in mutants if mutant.area == area]
        killed = sum(bool(outcomes[mutant.name].killer) for mutant in of_area)
        left = sum(survived(mutant, outcomes[mutant.name]) for mutant in of_area)
        counts = [len(of_area), killed, len(of_area) - killed - left, left]
        total = [one + other for one, other in zip(total, counts, strict=True)]
        lines.append(f"| [{area}](#{area}) | {' | '.join(map(str, counts))} |")
        sections += ["", f"## {area}", "", "| mutant | defect | seen in | killed by |", "|---|---|---|---|"]
        for mutant in of_area:
            row = [mutant.name, mutant.defect, mutant.seen_in, verdict(mutant, outcomes[mutant.name])]
            sections.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |")
    return "\n".join([*lines, f"| all | {' | '.join(map(str, total))} |", *sections]) + "\n"
