"""Write the state of GPUs, which the reports record, into the documents."""

import json
import os
import re
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.paths import REPO
from verl_precision.verify.report import counts
from verl_precision.verify.steps import STAGES, STEPS

REPORTS = REPO / "docs/results/gpu"
NONE = "**never run**: no CUDA kernel, NCCL or flash attention was tried; speed and memory are unknown"
MARKED = re.compile(r"(<!-- gpu -->).*?(<!-- /gpu -->)", re.S)
PLACES = (
    "README.md",
    "docs/tutorials/first-run-gpu.md",
    "docs/how-to/gpus.md",
    "patches/upstream/README.md",
    "docs/reference/limits.md",
)
INDEX = "docs/results/gpu/README.md"
HEAD = """\
# Reports on GPUs

[`make verify-gpu`](../../how-to/gpus.md#verify-a-gpu) writes a report for each GPU into this folder. `make matrix`
regenerates this page, and the sentence on GPUs in other documents. What was checked without a GPU:
[by reading](../../log/2026-11.md#2026-11-29-what-of-a-gpu-was-checked-by-reading).

"""


def stages(content: dict) -> str:
    """Return which stages passed, were not run, or were run in part."""
    by_result: dict[str, list[str]] = {}
    for stage in STAGES:
        steps = [step for step in STEPS if step.stage == stage]
        first, _, others = counts(content, steps).partition(", ")
        number, _, status = first.partition(" ")
        part = f": {number} of {len(steps)} {status}, {others}" if others else f" {status}"
        by_result.setdefault(part, []).append(stage)
    return "; ".join(f"{', '.join(names)}{result}" for result, names in by_result.items())


def sentence(page: Path, reports: Path = REPORTS) -> str:
    """Return which GPUs were verified, with links for ``page`` and how their stages ended."""
    found = [(file, json.loads(file.read_text())) for file in sorted(reports.glob("*.json"))]
    links = [
        f"[{content['name']}]({os.path.relpath(file.with_suffix('.md'), page.parent)}): {stages(content)}"
        for file, content in found
    ]
    return "; ".join(links) or NONE


def pages(reports: Path = REPORTS) -> dict[Path, str]:
    """Return the text of each page that reports the state of GPUs."""
    index = REPO / INDEX
    texts = {index: f"{HEAD}{sentence(index, reports)}\n"}
    for name in PLACES:
        page = REPO / name
        texts[page], marks = MARKED.subn(rf"\1{sentence(page, reports)}\2", page.read_text())
        if not marks:
            raise Refused(f"{name}: has no <!-- gpu --> … <!-- /gpu -->")
    return texts
