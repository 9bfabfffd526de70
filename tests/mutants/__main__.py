"""Put known defects into the project, one at a time: each must fail a test.

tests/mutants/AREA.toml defines them. A mutant is tried in a copy of the checkout, or in a patched release, against the
tests that it names or those whose imports lead to its file; the test that killed it last goes first. An interrupted run
resumes; a mutant is tried again when it, its file, its tests or their helpers have changed. A run of all mutants
writes docs/results/mutants.md.

Exit code: 0 every mutant was killed or is shown to be equivalent; 1 one survived or could not be tried.
"""

import sys

from mutants.document import document, survived, verdict
from mutants.table import Mutant, choose, load
from mutants.trial import Outcome, try_mutants
from verl_precision.cli import handled_errors
from verl_precision.paths import REPO
from verl_precision.words import Parser

DOCUMENT = REPO / "docs/results/mutants.md"


def main(words: list[str]) -> int:
    parser = Parser("mutants", __doc__)
    parser.add_argument("only", nargs="?", default="", metavar="ONLY", help="areas or mutants; without it, all")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants to try at once (default: 2)")
    options = parser.parse_args(words)
    table = load()
    mutants, tried = choose(table, options.only), []

    def show(mutant: Mutant, outcome: Outcome) -> None:
        tried.append(mutant.name)
        print(f"{len(tried)}/{len(mutants)} {mutant.area}/{mutant.name}: {verdict(mutant, outcome)}", flush=True)

    outcomes = try_mutants(mutants, min(options.jobs, len(mutants)), show)
    if mutants == table:
        DOCUMENT.write_text(document(table, outcomes))
    left = [mutant.name for mutant in mutants if survived(mutant, outcomes[mutant.name])]
    print(f"{len(mutants)} mutants, {len(left)} survivors{': ' if left else ''}{', '.join(left)}")
    return 1 if left else 0


if __name__ == "__main__":
    with handled_errors("mutants"):
        sys.exit(main(sys.argv[1:]))
