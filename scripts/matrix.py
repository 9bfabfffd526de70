"""Write the support matrices into README.md, from the results of make's test-releases, e2e-releases and test-oat."""

import argparse
import itertools
import json
import sys
from operator import itemgetter

from lib.patches.releases import load_releases
from lib.paths import REPO

RESULTS = REPO / "tests/expected/releases.json"
RUNS = REPO / "tests/expected/releases-e2e.json"
OAT_RESULTS = REPO / "tests/expected/oat.json"
OAT_RUNS = REPO / "tests/expected/oat-e2e.json"
README = REPO / "README.md"
# The lines around a table in the README.
MARKERS = {
    "verl": ("<!-- written by make matrix -->\n", "<!-- end of the matrix -->\n"),
    "oat": ("<!-- OAT's, written by make matrix -->\n", "<!-- end of OAT's matrix -->\n"),
}
LEGEND = "✓ observed on the patched release; ° on the unpatched one too, (°) in part; – cannot occur."
NOTES = "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖ"
# The releases that the FlowRL recipe cannot run on, and why.
WITHOUT_FLOWRL = dict.fromkeys(
    (name for name, release in load_releases().items() if not release.has("trainer_registry")),
    "`main_ppo` has one trainer there, and no registry that would take another",
)


class Notes(list[str]):
    """The notes of a table, in the order of their marks."""

    def marked(self, mark: str, note: str) -> str:
        """Return ``mark`` with the mark of ``note``, which is new or was there before."""
        note = note[0].upper() + note[1:]
        if note not in self:
            self.append(note)
        return mark + NOTES[self.index(note)]


def cell(cases: list[dict], notes: Notes) -> str:
    """Return the outcome of a row's cases on one release."""
    ran = [case for case in cases if "passed" in case]
    not_run = [case["not_run"] for case in cases if "not_run" in case]
    if not ran:
        return notes.marked("not run", not_run[0]) if not_run else notes.marked("–", cases[0]["absent"])
    upstream = [case["upstream_has_it"] for case in ran]
    mark = "✓" if all(case["passed"] for case in ran) else "**fails**"
    mark += "°" if all(upstream) else "(°)" if any(upstream) else ""
    return notes.marked(f"{mark}, in part not run", not_run[0]) if not_run else mark


def behaviours(results: dict, notes: Notes) -> list[list[str]]:
    """Return the head and a row for behaviours that belong together, a column a release."""
    columns = [
        {row: list(cases) for row, cases in itertools.groupby(release["seen"].values(), key=itemgetter("row"))}
        for release in results.values()
    ]
    rows = [[row, *(cell(column[row], notes) for column in columns)] for row in columns[0]]
    return [["", *results], ["---"] * (1 + len(results)), *rows]


def changed_lines(results: dict, framework: str) -> list[str]:
    return [f"changed lines of {framework}", *("+{added} −{removed}".format(**r["lines"]) for r in results.values())]


def end_to_end(results: dict, runs: dict, notes: Notes) -> list[str]:
    """Return whether each release ran as a whole; a run counts where the stack is still the same."""

    def run(release: str) -> str:
        if runs.get(release, {}).get("stack") != results[release]["stack"]:
            return "not run"
        return notes.marked("✓", f"with {runs[release]['rollout']} as rollout")

    return [run(release) for release in results]


def markdown(rows: list[list[str]], notes: Notes) -> str:
    """Return the table, then the legend and the notes."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    reasons = [f"{mark} {note}." for mark, note in zip(NOTES, notes, strict=False)]
    return "\n".join([*lines, "", " ".join([LEGEND, *reasons])]) + "\n"


def table(results: dict, runs: dict) -> str:
    """Return verl's matrix as Markdown.

    Args:
        results: by release, the outcomes of the conformance suite.
        runs: by release, the outcomes of its end-to-end runs.
    """
    notes = Notes()

    def flowrl(release: str) -> str:
        if release in WITHOUT_FLOWRL:
            return notes.marked("–", WITHOUT_FLOWRL[release])
        ran = runs.get(release, {}).get("flowrl", {}).get("stack") == results[release]["stack"]
        return "✓" if ran else "not run"

    rows = behaviours(results, notes)
    rows.append(["`main_ppo` in fp16, end to end, two steps", *end_to_end(results, runs, notes)])
    rows.append(["the FlowRL recipe in fp16, end to end, two steps", *map(flowrl, results)])
    rows.append(changed_lines(results, "verl"))
    return markdown(rows, notes)


def oat_table(results: dict, runs: dict) -> str:
    """Return OAT's matrix as Markdown, from the outcomes of its suite by release, and of whole runs."""
    notes = Notes()
    rows = behaviours(results, notes)
    rows.append(["a whole job in fp16: launchpad, vLLM, DeepSpeed", *end_to_end(results, runs, notes)])
    rows.append(changed_lines(results, "OAT"))
    return markdown(rows, notes)


def written(readme: str, framework: str, matrix: str) -> str:
    """Return ``readme`` with the framework's matrix between its markers; exits where it has none."""
    begin, end = MARKERS[framework]
    if not (begin in readme and end in readme):
        sys.exit(f"{README} has no lines {begin.strip()} and {end.strip()}")
    head, _, rest = readme.partition(begin)
    _, _, tail = rest.partition(end)
    return head + begin + matrix + end + tail


def current(readme: str) -> str:
    """Return ``readme`` with both matrices as the results have them."""
    results, runs, oat, oat_runs = (json.loads(file.read_text()) for file in (RESULTS, RUNS, OAT_RESULTS, OAT_RUNS))
    return written(written(readme, "verl", table(results, runs)), "oat", oat_table(oat, oat_runs))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # takes no arguments: --help and words write nothing
    README.write_text(current(README.read_text()))


if __name__ == "__main__":
    main()
