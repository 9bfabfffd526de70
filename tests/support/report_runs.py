"""Finished runs and recorded reports for the tests of reports."""

import json
from collections.abc import Mapping
from pathlib import Path

from verl_precision.facts.metrics import K3_KL, REWARD, SECONDS
from verl_precision.facts.regime import named_dtypes
from verl_precision.files import read_jsonl, write_json
from verl_precision.paths import REPO
from verl_precision.report.build import SETTINGS, write_runs
from verl_precision.report.content import Report, build_report
from verl_precision.report.readers import read_all
from verl_precision.report.render import outcome_rows, page
from verl_precision.report.statistics import THRESHOLD
from verl_precision.run.folder import start_record
from verl_precision.run.job import parse_job
from verl_precision.run.summary import summarize

RECORDED = sorted(file.parent for file in (REPO / "docs" / "results").rglob(SETTINGS))


def write_metrics(file: Path, steps: Mapping[int, Mapping]) -> Path:
    """Write metrics by step, a line each, as verl's file logger does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in steps.items()))
    return file


def made(
    out: Path,
    label: str = "fp16",
    seed: int = 1,
    steps: range = range(1, 11),
    *,
    dtypes: dict | None = None,
    **more: float | None | list[float],
) -> tuple[str, Path]:
    """Make the folder of a finished run; return label and folder.

    Args:
        dtypes: effective dtypes by role, if not those that the label names.
        more: further metrics, the same at every step or a list by step.
    """
    named = named_dtypes(label)
    if dtypes is None:
        dtypes = {"actor": {"compute": named["actor"]}, "rollout": {"rollout": named["rollout"]}}
    data = {REWARD: 0.5 + seed / 100, K3_KL: 1e-7 * seed, "perf/throughput": 100.0 + seed} | more
    rows = {
        step: {name: value[place] if isinstance(value, list) else value for name, value in data.items()}
        for place, step in enumerate(steps)
    }
    write_metrics(out / "metrics.jsonl", rows)
    settings = {"EXPERIMENT": "sanity_cpu", "PRECISION": label, "SEED": seed, "ARGS": ""}
    write_json(out / "run.json", {"settings": settings, "steps": len(steps)})
    write_json(out / "summary.json", {"effective_dtypes": dtypes, "wall_s": 9.0, "peak_memory_gib": 1.0})
    return label, out


def several(root: Path, labels: str = "fp16 bf16", seeds: range = range(1, 4), **more) -> list[tuple[str, Path]]:
    """Make the folders of runs whose entropy differs by seed and whose time differs by run."""
    pairs = [(label, seed) for label in labels.split() for seed in seeds]
    return [
        made(root / f"{label}-{seed}", label, seed, **{"actor/entropy": 4 + seed / 10, SECONDS: 2 + place} | more)
        for place, (label, seed) in enumerate(pairs)
    ]


def finished_run(out: Path, *words: str, steps: int = 3) -> Path:
    """Make the folder of a finished ``make run`` with these words, using the run's own code."""
    job = parse_job(["DEVICE=cpu", *words])
    data = {step: {REWARD: step / 4, K3_KL: 1e-7, SECONDS: 2.0 + job.seed} for step in range(1, steps + 1)}
    record = start_record(job, out, steps)
    file = write_metrics(out / "metrics.jsonl", data)
    write_json(out / "run.json", record)
    write_json(out / "summary.json", summarize(job, record, read_jsonl(file), []))
    return out


def built(pairs: list[tuple[str, Path]]) -> Report:
    """Return a report without writing it: figures take seconds."""
    return build_report(read_all(pairs), THRESHOLD, "Runs")


def built_from(folder: Path) -> Report:
    """Return the report of a folder, built from the runs that it keeps, without writing it."""
    kept = json.loads((folder / SETTINGS).read_text())
    pairs = [(label, folder / run) for label, run in kept["runs"]]
    return build_report(read_all(pairs), kept["threshold"], kept["title"])


def is_rebuilt_from(out: Path, original: Report) -> bool:
    """Return whether the runs that a report keeps give the same page and tables, figures aside."""
    write_runs(original, out)
    again = built_from(out)
    return page(again) == page(original) and outcome_rows(again) == outcome_rows(original)
