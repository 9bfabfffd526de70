"""Finished runs and recorded reports for the tests of reports."""

import json
from pathlib import Path

from lib.files import write_json
from lib.paths import REPO
from lib.report.build import SETTINGS
from lib.report.logged_run import named_dtypes
from lib.run.folder import start_record
from lib.run.job import parse_job
from lib.run.metrics import K3_KL, REWARD, SECONDS
from lib.run.summary import summarize

RECORDED = sorted(file.parent for file in (REPO / "docs" / "results").rglob(SETTINGS))


def made(out: Path, label: str = "fp16", seed: int = 1, steps: range = range(1, 11), **more: float | None) -> tuple:
    """Make the folder of a finished run with the effective dtypes that its label names; return label and folder.

    Args:
        more: further metrics, the same at every step.
    """
    out.mkdir(parents=True)
    settings = {"EXPERIMENT": "sanity_cpu", "PRECISION": label, "SEED": seed, "ARGS": ""}
    write_json(out / "run.json", {"settings": settings, "steps": len(steps)})
    named = named_dtypes(label)
    dtypes = {"actor": {"compute": named["actor"]}, "rollout": {"rollout": named["rollout"]}}
    write_json(out / "summary.json", {"effective_dtypes": dtypes, "wall_s": 9.0, "peak_memory_gib": 1.0})
    data = {REWARD: 0.5 + seed / 100, K3_KL: 1e-7 * seed, "perf/throughput": 100.0 + seed} | more
    lines = [json.dumps({"step": step, "data": data}) for step in steps]
    (out / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
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
    data = [
        {"step": step, "data": {REWARD: step / 4, K3_KL: 1e-7, SECONDS: 2.0 + job.seed}} for step in range(1, steps + 1)
    ]
    record = start_record(job, out, steps)
    out.mkdir(parents=True)
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    write_json(out / "run.json", record)
    write_json(out / "summary.json", summarize(job, record, data, []))
    return out


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder by their relative path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
