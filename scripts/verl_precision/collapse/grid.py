"""Describe runs of the recall task, and make them one after another."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from pathlib import Path

from recipes.recall.task import LengthError, Recall
from verl_precision.errors import Refused
from verl_precision.format import slug
from verl_precision.paths import CACHE, REPO
from verl_precision.run.code_versions import CodeVersion
from verl_precision.run.sweep import SweepOutcome, SweepPlan, SweepRun, find_finished, run_sweep
from verl_precision.words import options

LENGTH, LIFT, STEPS = 128, 160, 60
FEWEST_STEPS = 20  # of a run whose first three and last ten steps are compared
ROOM = 8  # tokens that data.max_response_length leaves beyond an answer
# Keys of a group and their defaults. Those of LISTS may be lists.
LISTS = {"lift": LIFT, "length": LENGTH, "ALGO": "pg_is", "PRECISION": "bf16", "SEED": 1}
SHARED = {"ARGS": "", "STEPS": STEPS}
LEAST = {"lift": 0, "SEED": 0, "STEPS": FEWEST_STEPS}


@dataclass(frozen=True)
class GridRun:
    """A run of the recall task. ``lift`` in units of a logit, ``length`` in tokens of an answer without its end."""

    group: str
    precision: str
    seed: int
    algo: str = "pg_is"
    lift: int = LIFT
    length: int = LENGTH
    args: str = ""
    steps: int = STEPS

    @property
    def name(self) -> str:
        """Folder of the run, relative to that of all runs."""
        dials = f"lift{self.lift}-length{self.length}"
        return f"{slug(self.group)}/{self.algo}-{dials}-{self.precision}-seed{self.seed}"

    @property
    def weighting(self) -> str:
        """Importance weights of the run in words, and whether its learning rate is smaller."""
        if self.algo != "pg_is":
            return "no weights"
        level = "token" if "rollout_is=token" in self.args else "sequence"
        truncated = ", truncated" if "rollout_is_threshold=" in self.args else ""
        return f"{level}-level weights{truncated}{', smaller learning rate' if 'optim.lr=' in self.args else ''}"

    @property
    def prepared(self) -> Path:
        """The folder of the model and the data."""
        return CACHE / f"recall-{self.length}-{self.lift}"

    def prepare_command(self) -> list[str]:
        """Return the command that makes ``prepared`` where it is missing."""
        dials = ["--length", str(self.length), "--lift", str(self.lift)]
        return [sys.executable, "-m", "recipes.recall.prepare", *dials, "--out", str(self.prepared)]

    def words(self, out: Path, device: str) -> list[str]:
        """Return the words of the command ``run``."""
        length = "" if self.length == LENGTH else f"data.max_response_length={self.length + ROOM}"
        return [
            *(f"DEVICE={device}", "EXPERIMENT=recall", f"ALGO={self.algo}", f"PRECISION={self.precision}"),
            *(f"SEED={self.seed}", f"STEPS={self.steps}", f"ARGS={' '.join(filter(None, [length, self.args]))}"),
            *(f"MODEL={self.prepared / 'model'}", f"TRAIN={self.prepared / 'train.parquet'}"),
            *(f"VAL={self.prepared / 'val.parquet'}", f"OUT={out / self.name}"),
        ]

    def sweep_run(self, out: Path, device: str) -> SweepRun:
        """Return the run as one of a sweep into ``out``."""
        label = f"{self.precision}, {self.group}, lift {self.lift}, {self.length} tokens"
        words = tuple(self.words(out, device))
        return SweepRun(CodeVersion(), self.algo, label, str(self.seed), words, out / self.name)


def make_runs(runs: Sequence[GridRun], out: Path, device: str) -> SweepOutcome:
    """Make the runs that are not finished in ``out``, after their models, and show the progress.

    One after another: the weight sync of two verl jobs on one machine, each with its own Ray, shares a socket.

    Raises:
        Refused: one of the runs can neither start nor resume.
        subprocess.CalledProcessError: a model could not be prepared; the command has printed why.
    """
    for command in dict.fromkeys(tuple(run.prepare_command()) for run in runs):
        subprocess.run(command, cwd=REPO, check=True)
    planned = tuple(run.sweep_run(out, device) for run in runs)
    finished = tuple(find_finished(CodeVersion(), planned)) if planned else ()
    outcome = run_sweep(SweepPlan("recall", out, planned, finished))
    for each in outcome.failed:
        print(f"failed: {each}, {each.out / 'train.log'}")
    if outcome.code:
        print("repeat the command to resume")
    return outcome


def load_grid(file: Path) -> list[GridRun]:
    """Return the runs of a grid in their order: all groups with their first seed, then with their second, and so on.

    So each setting has one run before any has two.

    Raises:
        Refused: the file cannot be read, or a group has a key or a value that is not allowed.
    """
    import tomllib  # Python 3.11

    try:
        groups = tomllib.loads(file.read_text()).get("group")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"GRID={file}: is not a readable TOML file ({error})") from error
    if not groups or not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise Refused(f"GRID={file}: must have a [[group]] table for each group of runs")
    by_seed = [list(expand(group, file)) for group in groups]
    runs = [run for of_groups in zip_longest(*by_seed, fillvalue=()) for of_group in of_groups for run in of_group]
    names = [run.name for run in runs]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise Refused(f"GRID={file}: two runs would share the folder {repeated[0]}")
    return runs


def fault(key: str, value: int | str) -> str:
    """Return why a value of a group is not allowed, "" if it is; its type is right."""
    if key in LEAST and value < LEAST[key]:
        return f"must be at least {LEAST[key]}"
    if key == "name" and not slug(value):
        return "must contain a letter or a digit"
    if key == "name" and "," in value:
        return "must not contain a comma, which separates the groups of ONLY"
    if key in ("ALGO", "PRECISION") and value not in (allowed := options(key.lower())):
        return f"must be one of {', '.join(allowed)}"
    if key == "length":
        try:
            Recall(value)
        except LengthError as error:
            return str(error).partition(": ")[2]
    return ""


def expand(group: dict, file: Path) -> Iterator[list[GridRun]]:
    """Yield, for each seed of a group, its runs; each element of a list is a run.

    Raises:
        Refused: a key or a value is not allowed.
    """
    allowed = {"name": "", **LISTS, **SHARED}
    values = LISTS | SHARED | group
    for key, value in ({"name": None} | values).items():
        if key not in allowed:
            raise Refused(f"GRID={file}: {key} is not a key of a [[group]]; the keys are {', '.join(allowed)}")
        several = value if key in LISTS and isinstance(value, list) else [value]
        if not several or any(type(each) is not type(allowed[key]) for each in several):
            kind = "whole number" if isinstance(allowed[key], int) else "text"
            raise Refused(
                f"GRID={file}: {key}={value} in the group {group.get('name')}: must be a {kind}"
                f"{', or a list of these' if key in LISTS else ''}"
            )
        for each in several:
            if reason := fault(key, each):
                raise Refused(f"GRID={file}: {key}={each} in the group {group.get('name')}: {reason}")
    *lists, seeds = ([values[key]] if not isinstance(values[key], list) else values[key] for key in LISTS)
    for seed in seeds:
        yield [
            GridRun(values["name"], precision, seed, algo, lift, length, values["ARGS"], values["STEPS"])
            for lift, length, algo, precision in product(*lists)
        ]
