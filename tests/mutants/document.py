"""Summarize the outcomes of all mutants as docs/results/mutants.md."""

from collections.abc import Mapping, Sequence

from mutants.table import Mutant
from mutants.trial import Outcome
from verl_precision.format import markdown_table

TIERS = ("unit", "engine", "conformance")  # folders of tests/
HEAD = """\
# Mutants

A mutant replaces one text of the project by a known defect; `tests/mutants/AREA.toml` defines the mutants of an area.
`make mutants` puts them into the project, one at a time. A mutant is killed if a test fails on it that passes without
it; the columns count the mutants by the folder of `tests/` that contains this test. No test can fail on an equivalent
one. A run of all mutants regenerates the page.
"""


def survived(mutant: Mutant, outcome: Outcome) -> bool:
    """Return whether a mutant lives that is not shown to be equivalent, or could not be tried."""
    return bool(outcome.problem) or not outcome.killer and not mutant.equivalent


def verdict(mutant: Mutant, outcome: Outcome) -> str:
    """Return the outcome of a mutant as text."""
    if outcome.killer:
        return f"killed by {outcome.killer}"
    reason = f"equivalent: {mutant.equivalent}" if mutant.equivalent else "SURVIVED"
    return f"NOT TRIED: {outcome.problem}" if outcome.problem else reason


def document(mutants: Sequence[Mutant], outcomes: Mapping[str, Outcome]) -> str:
    """Return the page: a row per area, then the mutants that no test kills, with the reason if they are equivalent."""
    rows = []
    for area in (*dict.fromkeys(mutant.area for mutant in mutants), "all"):
        chosen = [mutant for mutant in mutants if area in (mutant.area, "all")]
        killers = [outcomes[mutant.name].killer for mutant in chosen]
        killed = [sum(killer.startswith(f"tests/{tier}/") for killer in killers) for tier in TIERS]
        left = sum(survived(mutant, outcomes[mutant.name]) for mutant in chosen)
        equivalent = len(chosen) - left - sum(map(bool, killers))
        name = area if area == "all" else f"[{area}](../../tests/mutants/{area}.toml)"
        rows.append([name, len(chosen), *killed, equivalent, left])
    header = ["area", "mutants", *(f"killed in {tier}" for tier in TIERS), "equivalent", "survivors"]
    exceptions = [
        f"\n{mutant.area}/{mutant.name}, {mutant.defect}: {verdict(mutant, outcomes[mutant.name])}"
        for mutant in mutants
        if not outcomes[mutant.name].killer
    ]
    return "\n".join([HEAD, *markdown_table(header, rows), *exceptions]) + "\n"
