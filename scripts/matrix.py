"""Write the support matrix into README.md, from what the conformance suite saw (docs/results/releases.json)."""

import itertools
import json
import sys
from operator import itemgetter

from lib.releases import PROJECT

RESULTS = PROJECT / "docs/results/releases.json"
README = PROJECT / "README.md"
BEGIN, END = "<!-- written by make matrix -->\n", "<!-- end of the matrix -->\n"
LEGEND = "✓ seen on the patched release; ° the unpatched one has it too, (°) in part; – cannot be there."
NOTES = "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲ"


def table(results: dict) -> str:
    """The matrix as Markdown: a row for behaviours that belong together, a column a release, then the reasons."""
    notes: list[str] = []

    def cell(cases: list[dict]) -> str:
        if why := cases[0].get("absent"):
            if why not in notes:
                notes.append(why)
            return f"–{NOTES[notes.index(why)]}"
        upstream = [case["upstream_has_it"] for case in cases]
        return ("✓" if all(case["passed"] for case in cases) else "**fails**") + (
            "°" if all(upstream) else "(°)" if any(upstream) else ""
        )

    columns = [
        {row: list(cases) for row, cases in itertools.groupby(release["seen"].values(), key=itemgetter("row"))}
        for release in results.values()
    ]
    rows = [["", *results], ["---"] * (1 + len(results))]
    rows += [[row, *(cell(column[row]) for column in columns)] for row in columns[0]]
    rows.append(["changed lines", *("+{added} −{removed}".format(**r["lines"]) for r in results.values())])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    reasons = [f"{mark} {note}." for mark, note in zip(NOTES, notes, strict=False)]
    return "\n".join([*lines, "", " ".join([LEGEND, *reasons])]) + "\n"


def written(readme: str, matrix: str) -> str:
    """``readme`` with the matrix between its markers."""
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + matrix + END + tail


def main() -> None:
    readme = README.read_text()
    if not (BEGIN in readme and END in readme):
        sys.exit(f"{README} has no lines {BEGIN.strip()} and {END.strip()}")
    README.write_text(written(readme, table(json.loads(RESULTS.read_text()))))


if __name__ == "__main__":
    main()
