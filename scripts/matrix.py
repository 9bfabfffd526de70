"""Write the support matrix into README.md, from what `make test-releases` and `make e2e-releases` saw."""

import itertools
import json
import sys
from operator import itemgetter

from lib.releases import PROJECT

RESULTS = PROJECT / "docs/results/releases.json"
RUNS = PROJECT / "docs/results/releases-e2e.json"
README = PROJECT / "README.md"
BEGIN, END = "<!-- written by make matrix -->\n", "<!-- end of the matrix -->\n"
LEGEND = "✓ seen on the patched release; ° the unpatched one has it too, (°) in part; – cannot be there."
NOTES = "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲ"
# The releases that the FlowRL recipe cannot run on, and why; tests/e2e/test_releases.py looks whether it is so.
WITHOUT_FLOWRL = dict.fromkeys(
    ("0.4.1", "0.5.0", "0.6.0", "0.6.1", "0.7.0", "0.7.1", "0.8.0"),
    "`main_ppo` has one trainer there, and no registry that would take another",
)


def table(results: dict, runs: dict) -> str:
    """The matrix as Markdown: a row for behaviours that belong together, a column a release, then the notes.

    Args:
        results: by release, what the conformance suite saw.
        runs: by release, what its end-to-end runs gave; they count where the stack is still the same.
    """
    notes: list[str] = []

    def noted(mark: str, note: str) -> str:
        note = note[0].upper() + note[1:]
        if note not in notes:
            notes.append(note)
        return mark + NOTES[notes.index(note)]

    def run(release: str) -> str:
        if runs.get(release, {}).get("stack") != results[release]["stack"]:
            return "not run"
        return noted("✓", f"with {runs[release]['rollout']} as rollout")

    def flowrl(release: str) -> str:
        if release in WITHOUT_FLOWRL:
            return noted("–", WITHOUT_FLOWRL[release])
        ran = runs.get(release, {}).get("flowrl", {}).get("stack") == results[release]["stack"]
        return "✓" if ran else "not run"

    def cell(cases: list[dict]) -> str:
        present = [case for case in cases if "absent" not in case]
        if not present:
            return noted("–", cases[0]["absent"])
        upstream = [case["upstream_has_it"] for case in present]
        return ("✓" if all(case["passed"] for case in present) else "**fails**") + (
            "°" if all(upstream) else "(°)" if any(upstream) else ""
        )

    columns = [
        {row: list(cases) for row, cases in itertools.groupby(release["seen"].values(), key=itemgetter("row"))}
        for release in results.values()
    ]
    rows = [["", *results], ["---"] * (1 + len(results))]
    rows += [[row, *(cell(column[row]) for column in columns)] for row in columns[0]]
    rows.append(["`main_ppo` in fp16, end to end, two steps", *map(run, results)])
    rows.append(["the FlowRL recipe in fp16, end to end, two steps", *map(flowrl, results)])
    rows.append(["changed lines of verl", *("+{added} −{removed}".format(**r["lines"]) for r in results.values())])
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
    README.write_text(written(readme, table(*map(json.loads, (RESULTS.read_text(), RUNS.read_text())))))


if __name__ == "__main__":
    main()
