"""Write docs/reference/support-{verl,oat}.md from tests/expected, and the state of GPUs from docs/results/gpu."""

import itertools
import json
import re
from collections.abc import Sequence
from functools import cache
from operator import itemgetter

from verl_precision.parser import Parser
from verl_precision.patch.releases import load_releases
from verl_precision.patch.stack import Stack, load_stacks, whole
from verl_precision.paths import REPO
from verl_precision.verify.state import pages as gpu_pages

RESULTS = REPO / "tests/expected/releases.json"
RUNS = REPO / "tests/expected/releases-e2e.json"
OAT_RESULTS = REPO / "tests/expected/oat.json"
OAT_RUNS = REPO / "tests/expected/oat-e2e.json"
PAGES = {name: REPO / f"docs/reference/support-{name}.md" for name in ("verl", "oat")}
HEADS = {
    "verl": """\
# Support matrix of verl

This page lists what one conformance suite observed on each release of verl. The suite runs the release's own workers
on two ranks of a CPU, unpatched and patched with the series `precision`, under FSDP1 and FSDP2; a defect that the
[series `fixes`](../how-to/patch.md#fixes) corrects is observed with both. The unpatched release runs under FSDP2 only,
except where it is compared bitwise. `make test-releases e2e-releases` records the outcomes, `make matrix`
regenerates the page.
""",
    "oat": """\
# Support matrix of OAT

This page lists what one conformance suite observed on each release of OAT. The suite runs the release's own learner on
two ranks of DeepSpeed 0.16.8 on a CPU, and the receiving end of its vLLM worker, patched and unpatched. `make test-oat`
records the outcomes, `make matrix` regenerates the page.
""",
}
LEGEND = """\
- ✓: observed on the patched release.
- °: observed on the unpatched release, too; (°): there in part.
- –: cannot occur on the release, or cannot be tested on a CPU: see the note.
- changed lines: of all patches together, without the files that are copied in."""
NOTES = "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖ"
# The releases that the FlowRL recipe cannot run on, and why.
WITHOUT_FLOWRL = dict.fromkeys(
    (name for name, release in load_releases().items() if not release.has("trainer_registry")),
    "`main_ppo` of the release has no registry to which a trainer can be added",
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


@cache
def stacks_of_verl() -> list[Stack]:
    """Return the stacks of all releases of verl."""
    return load_stacks()


def series_sizes() -> list[list[str]]:
    """Return, of each series of each release of verl, the numbers of its patches, of the files that they change, and of
    their hooks, which are hunks."""
    rows = []
    names = {
        False: "patches in `precision`, files that they change, hooks",
        True: "patches in `fixes`, files, some the same, hooks",
    }
    for fixes, name in names.items():
        row = [name]
        for stack in whole(stacks_of_verl()).values():
            patches = [patch for patch in stack.patches if patch.fixes == fixes]
            files = {path for patch in patches for path, _, _ in patch.blobs}
            hooks = sum(len(re.findall("^@@ ", patch.text, re.M)) for patch in patches)
            row.append(f"{len(patches)}, {len(files)}, {hooks}")
        rows.append(row)
    return rows


def is_current(run: dict, release: str, results: dict) -> bool:
    """Return whether a whole run was made with a stack that the release still has, that of either series."""
    stacks = [stack.id for stack in stacks_of_verl() if stack.release.name == release]
    return run.get("stack") in (results[release]["stack"], *stacks)


def end_to_end(results: dict, runs: dict, notes: Notes) -> list[str]:
    """Return whether each release ran as a whole; a run counts where the stack is still the same."""

    def run(release: str) -> str:
        if not is_current(runs.get(release, {}), release, results):
            return "not run"
        return notes.marked("✓", f"rollout: {runs[release]['rollout']}")

    return [run(release) for release in results]


def alike(results: dict, runs: dict, notes: Notes) -> list[str]:
    """Return whether a job without a request was compared with that of the unpatched release."""

    def compared(release: str) -> str:
        run = runs.get(release, {}).get("unrequested", {})
        if not is_current(run, release, results):
            return "not run"
        return notes.marked("✓", "{metrics} metrics, {files} files, {config} settings, {lines} lines".format(**run))

    return [compared(release) for release in results]


def markdown(rows: list[list[str]], notes: Notes) -> str:
    """Return the table, then the legend and the notes."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    reasons = [f"- {mark}: {note}." for mark, note in zip(NOTES, notes, strict=False)]
    return "\n".join([*lines, "", LEGEND, *reasons]) + "\n"


def table(results: dict, runs: dict, sizes: Sequence[list[str]] = ()) -> str:
    """Return verl's matrix as Markdown.

    Args:
        sizes: rows on the series, see ``series_sizes``.
        results: by release, the outcomes of the conformance suite.
        runs: by release, the outcomes of its end-to-end runs.
    """
    notes = Notes()

    def flowrl(release: str) -> str:
        if release in WITHOUT_FLOWRL:
            return notes.marked("–", WITHOUT_FLOWRL[release])
        return "✓" if is_current(runs.get(release, {}).get("flowrl", {}), release, results) else "not run"

    rows = behaviours(results, notes)
    rows.append(["`main_ppo` runs two steps in fp16, patched with `precision` only", *end_to_end(results, runs, notes)])
    same = "`main_ppo` with no key set, and resumed: metrics, checkpoints, output as upstream"
    rows.append([same, *alike(results, runs, notes)])
    rows.append(["the FlowRL recipe runs two steps in fp16", *map(flowrl, results)])
    rows += [*sizes, changed_lines(results, "verl")]
    return markdown(rows, notes)


def oat_table(results: dict, runs: dict) -> str:
    """Return OAT's matrix as Markdown, from the outcomes of its suite by release, and of whole runs."""
    notes = Notes()
    rows = behaviours(results, notes)
    rows.append(["a whole job runs in fp16: launchpad, vLLM, DeepSpeed", *end_to_end(results, runs, notes)])
    rows.append(changed_lines(results, "OAT"))
    return markdown(rows, notes)


def pages() -> dict[str, str]:
    """Return the page of each framework, from the recorded outcomes."""
    results, runs, oat, oat_runs = (json.loads(file.read_text()) for file in (RESULTS, RUNS, OAT_RESULTS, OAT_RUNS))
    tables = {"verl": table(results, runs, series_sizes()), "oat": oat_table(oat, oat_runs)}
    return {framework: f"{HEADS[framework]}\n{tables[framework]}" for framework in PAGES}


def main(words: list[str]) -> int:
    Parser("verl-precision matrix", __doc__).parse_args(words)  # --help and words write nothing
    for framework, page in pages().items():
        PAGES[framework].write_text(page)
    for file, text in gpu_pages().items():
        file.write_text(text)
    return 0
