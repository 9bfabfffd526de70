"""Read the grid of the recall task, and make its runs: ``scripts/run.py`` in a process each, some at a time."""

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from lib.errors import Refused
from lib.format import duration, slug
from lib.paths import CACHE, CONFIGS, REPO
from lib.process import start_child

GRID = CONFIGS / "compare/collapse.toml"
# Of a group of runs: its name, what its runs differ in, and what they share.
DEFAULTS = {"lift": 160, "length": 128, "ALGO": "pg_is", "PRECISION": "bf16", "SEED": 1}
SHARED = {"ARGS": "", "STEPS": 60}
POLL_S = 0.5


@dataclass(frozen=True)
class GridRun:
    """A run of the grid."""

    group: str
    lift: int
    length: int
    algo: str
    precision: str
    seed: int
    args: str
    steps: int

    @property
    def name(self) -> str:
        """The run's folder below that of the grid."""
        return f"{slug(self.group)}/{self.algo}-lift{self.lift}-length{self.length}-{self.precision}-seed{self.seed}"

    @property
    def prepared(self) -> Path:
        """The folder of the model and the data."""
        return CACHE / f"recall-{self.length}-{self.lift}"

    def prepare_command(self) -> list[str]:
        """Return the command that makes ``prepared``; it reuses what exists."""
        dials = ["--length", str(self.length), "--lift", str(self.lift)]
        return [sys.executable, "-m", "recipes.recall.prepare", *dials, "--out", str(self.prepared)]

    def words(self, out: Path) -> list[str]:
        """Return the words of ``scripts/run.py``."""
        length = "" if self.length == 128 else f"data.max_response_length={self.length + 8}"
        return [
            *("DEVICE=cpu", "EXPERIMENT=recall", f"ALGO={self.algo}", f"PRECISION={self.precision}"),
            *(f"SEED={self.seed}", f"STEPS={self.steps}", f"ARGS={' '.join(filter(None, [length, self.args]))}"),
            *(f"MODEL={self.prepared / 'model'}", f"TRAIN={self.prepared / 'train.parquet'}"),
            *(f"VAL={self.prepared / 'val.parquet'}", f"OUT={out / self.name}"),
        ]

    def finished(self, out: Path) -> bool:
        return (out / self.name / "summary.json").exists()


def load_grid(file: Path = GRID) -> list[GridRun]:
    """Return the runs of a grid in their order: in a group, seeds are outermost.

    Raises:
        Refused: a group has no name, or a key that is unknown.
    """
    return [run for group in tomllib.loads(file.read_text())["group"] for run in expand(group, file)]


def expand(group: dict, file: Path) -> Iterator[GridRun]:
    """Yield the runs of a group; a list stands for one run each."""
    allowed = ["name", *DEFAULTS, *SHARED]
    if unknown := [key for key in group if key not in allowed] or ([] if "name" in group else ["no name"]):
        raise Refused(f"{file}: {unknown[0]} in a group; its keys are {', '.join(allowed)}")
    values = DEFAULTS | SHARED | group
    lists = {key: values[key] if isinstance(values[key], list) else [values[key]] for key in DEFAULTS}
    for seed, length, lift, algo, precision in product(
        *(lists[key] for key in ("SEED", "length", "lift", "ALGO", "PRECISION"))
    ):
        yield GridRun(group["name"], lift, length, algo, precision, seed, values["ARGS"], values["STEPS"])


def run_grid(runs: list[GridRun], out: Path, parallel: int) -> list[GridRun]:
    """Make the runs that are not finished, ``parallel`` at a time, and return those that failed."""
    ahead = [run for run in runs if not run.finished(out)]
    print(f"{len(runs) - len(ahead)} of {len(runs)} runs are finished; all in {out}", flush=True)
    started, failed = time.monotonic(), []
    active: dict[GridRun, subprocess.Popen] = {}
    while ahead or active:
        while ahead and len(active) < parallel:
            run = ahead.pop(0)
            subprocess.run(run.prepare_command(), cwd=REPO, check=True, stdout=subprocess.DEVNULL)
            log = out / "logs" / f"{run.name.replace('/', '-')}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, REPO / "scripts/run.py", *run.words(out)]
            with log.open("w") as file:
                active[run] = start_child(command, REPO, os.environ, file)
        time.sleep(POLL_S)
        for run, process in [*active.items()]:
            if process.poll() is None:
                continue
            del active[run]
            if process.returncode:
                failed.append(run)
                text = f"failed with exit code {process.returncode}"
            else:
                summary = json.loads((out / run.name / "summary.json").read_text())
                text = f"accuracy {summary['reward_first']:.3f} to {summary['reward_last']:.3f}"
            elapsed = duration(time.monotonic() - started)
            print(f"[{elapsed:>6}] {run.name}: {text}; {len(ahead) + len(active)} left", flush=True)
    return failed
