"""Write docs/results/support-{verl,oat}.md from tests/expected, and the state of GPUs from docs/results/gpu."""

import itertools
import json
import re
from collections.abc import Sequence
from functools import cache
from operator import itemgetter

from support.gpu_state import pages as gpu_pages
from verl_precision.patch.releases import load_releases
from verl_precision.patch.stack import Stack, load_stacks, whole
from verl_precision.paths import REPO

RECORDED = {  # the outcomes of each conformance suite, and of whole jobs
    "verl": ("tests/expected/releases.json", "tests/expected/releases-e2e.json"),
    "oat": ("tests/expected/oat.json", "tests/expected/oat-e2e.json"),
}
PAGES = {name: REPO / f"docs/results/support-{name}.md" for name in RECORDED}
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
JOBS = {  # rows on whole jobs: name, key in the recorded outcomes, note
    "verl": [
        ("`main_ppo` runs two steps in fp16, patched with `precision` only", "", "rollout: {rollout}"),
        (
            "`main_ppo` with no key set, and resumed: metrics, checkpoints, output as upstream",
            "unrequested",
            "{metrics} metrics, {files} files, {config} settings, {lines} lines",
        ),
        ("the FlowRL recipe runs two steps in fp16", "flowrl", ""),
    ],
    "oat": [("a whole job runs in fp16: launchpad, vLLM, DeepSpeed", "", "rollout: {rollout}")],
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
        """Return ``mark`` with the mark of ``note``, which is added if it is new."""
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


def behavior_rows(results: dict, notes: Notes) -> list[list[str]]:
    """Return the header and a row for behaviors that belong together, a column per release."""
    columns = [
        {row: list(cases) for row, cases in itertools.groupby(release["seen"].values(), key=itemgetter("row"))}
        for release in results.values()
    ]
    rows = [[row, *(cell(column[row], notes) for column in columns)] for row in columns[0]]
    return [["", *results], ["---"] * (1 + len(results)), *rows]


@cache
def stacks_of_verl() -> list[Stack]:
    """Return the stacks of all releases of verl."""
    return load_stacks()


def series_sizes() -> list[list[str]]:
    """Return for each series a row with the number of its patches, changed files and hooks, which are hunks."""
    rows = [
        ["patches in `precision`, files that they change, hooks"],
        ["patches in `fixes`, files, some the same, hooks"],
    ]
    for stack in whole(stacks_of_verl()).values():
        for fixes, row in enumerate(rows):
            patches = [patch for patch in stack.patches if patch.fixes == bool(fixes)]
            files = {path for patch in patches for path, _, _ in patch.blobs}
            hooks = sum(len(re.findall("^@@ ", patch.text, re.M)) for patch in patches)
            row.append(f"{len(patches)}, {len(files)}, {hooks}")
    return rows


def is_current(run: dict, release: str, results: dict) -> bool:
    """Return whether a job ran with a stack that the release still has, that of either series."""
    stacks = [stack.id for stack in stacks_of_verl() if stack.release.name == release]
    return run.get("stack") in (results[release]["stack"], *stacks)


def job_row(row: tuple[str, str, str], results: dict, runs: dict, notes: Notes) -> list[str]:
    """Return a row of ``JOBS``; a job counts if it ran with a current stack."""
    name, part, note = row
    cells = []
    for release in results:
        job = runs.get(release, {})
        job = job.get(part, {}) if part else job
        if part == "flowrl" and release in WITHOUT_FLOWRL:
            cells.append(notes.marked("–", WITHOUT_FLOWRL[release]))
        elif not is_current(job, release, results):
            cells.append("not run")
        else:
            cells.append(notes.marked("✓", note.format(**job)) if note else "✓")
    return [name, *cells]


def table(framework: str, results: dict, runs: dict, sizes: Sequence[list[str]] = ()) -> str:
    """Return the matrix of "verl" or "oat" as Markdown, with its legend and notes.

    Args:
        results: by release, the outcomes of the conformance suite.
        runs: by release, the outcomes of its whole jobs.
        sizes: rows on the series, see ``series_sizes``.
    """
    notes = Notes()
    rows = behavior_rows(results, notes) + [job_row(row, results, runs, notes) for row in JOBS[framework]]
    changed = ["+{added} −{removed}".format(**result["lines"]) for result in results.values()]
    rows += [*sizes, [f"changed lines of {'OAT' if framework == 'oat' else 'verl'}", *changed]]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    reasons = [f"- {mark}: {note}." for mark, note in zip(NOTES, notes, strict=False)]
    return "\n".join([*lines, "", LEGEND, *reasons]) + "\n"


def pages() -> dict[str, str]:
    """Return the page of each framework, from the recorded outcomes."""
    texts = {}
    for framework, files in RECORDED.items():
        results, runs = (json.loads((REPO / file).read_text()) for file in files)
        sizes = series_sizes() if framework == "verl" else ()
        texts[framework] = f"{HEADS[framework]}\n{table(framework, results, runs, sizes)}"
    return texts


def main() -> None:
    for framework, page in pages().items():
        PAGES[framework].write_text(page)
    for file, text in gpu_pages().items():
        file.write_text(text)


if __name__ == "__main__":
    main()
