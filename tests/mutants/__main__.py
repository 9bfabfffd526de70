"""Put known defects into the project, one at a time: each must fail a test.

tests/mutants/AREA.toml lists them. A mutant is tried in a copy of the checkout, or in a patched release, against the
tests that it names or that import its file; the one that killed it last goes first. An interrupted run goes on where it
was; a mutant is tried again when it, its file, its tests or their helpers have changed. A run of all mutants writes
docs/reference/mutants.md.
Exit code: 0 every mutant was killed or is shown to be equivalent, 1 one survived or could not be tried.
"""

import argparse

from mutants.document import document, killers, survived
from mutants.table import Mutant, choose, load
from mutants.trial import Outcome, Outcomes, try_mutants
from verl_precision.parser import Parser
from verl_precision.paths import REPO

DOCUMENT = REPO / "docs/reference/mutants.md"


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser("verl-precision mutants", __doc__)
    parser.add_argument("only", nargs="?", default="", metavar="ONLY", help="areas or mutants; without it, all")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants to try at once (default: 2)")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    options = parse(words)
    table = load()
    mutants, tried = choose(table, options.only), []

    def show(mutant: Mutant, outcome: Outcome) -> None:
        tried.append(mutant.name)
        result = f"killed by {outcome.killer}" if outcome.killer else "survived, equivalent"
        if survived(mutant, outcome):
            result = f"NOT TRIED: {outcome.problem}" if outcome.problem else "SURVIVED"
        name = f"{mutant.area}/{mutant.name}"
        print(f"{len(tried)}/{len(mutants)} {name}: {result} ({outcome.seconds:.0f} s)", flush=True)

    known = Outcomes(hints=killers(DOCUMENT.read_text()) if DOCUMENT.exists() else {})
    outcomes = try_mutants(mutants, min(options.jobs, len(mutants)), show, known)
    if mutants == table:
        DOCUMENT.write_text(document(table, outcomes))
    left = [mutant.name for mutant in mutants if survived(mutant, outcomes[mutant.name])]
    print(f"{len(mutants)} mutants, {len(left)} survivors{': ' if left else ''}{', '.join(left)}")
    return 1 if left else 0
