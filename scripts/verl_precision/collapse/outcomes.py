"""Read the outcomes of runs of the recall task, and keep them in one table."""

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median

from verl_precision.collapse.grid import GridRun
from verl_precision.facts.metrics import K3_KL, REWARD, metric_values, training_rows
from verl_precision.files import read_jsonl
from verl_precision.format import markdown_table, number
from verl_precision.report.statistics import ERROR, LEAST_SEEDS, welch

ESS = "rollout_corr/rollout_is_eff_sample_size"
FIRST, LAST = 3, 10  # steps whose mean accuracy is the first, and the last
SETTINGS = {field.name: field.type for field in fields(GridRun)}
DERIVED = ("first", "last", "median_k3", "total_k3")
SERIES = ("accuracy", "k3", "ess")
DIGITS = ".4g"  # of the numbers in the table


@dataclass(frozen=True)
class RecallOutcome:
    """A run's outcome, step by step.

    Attributes:
        wall_s: seconds, with start-up.
        accuracy: share of right answers.
        k3: nats per token; NaN at a step without one.
        ess: verl's effective sample size of the importance weights, as a share; empty without weights.
    """

    run: GridRun
    wall_s: float
    accuracy: tuple[float, ...]
    k3: tuple[float, ...]
    ess: tuple[float, ...]

    @property
    def first(self) -> float:
        """Mean accuracy of the first ``FIRST`` steps."""
        return fmean(self.accuracy[:FIRST])

    @property
    def last(self) -> float:
        """Mean accuracy of the last ``LAST`` steps."""
        return fmean(self.accuracy[-LAST:])

    @property
    def median_k3(self) -> float:
        """k3 of the median step; NaN without any."""
        return median([value for value in self.k3 if math.isfinite(value)] or [math.nan])

    @property
    def median_ess(self) -> float | None:
        """Effective share of the samples at the median step; None without weights."""
        return median(self.ess) if self.ess else None

    @property
    def total_k3(self) -> float:
        """T·k3 at the first step, before training changes it: tokens of an answer times k3, in nats."""
        return (self.run.length + 1) * self.k3[0]


def read_outcome(run: GridRun, folder: Path) -> RecallOutcome:
    """Return the outcome of a finished run, its series rounded as ``write_table`` writes them."""
    wall_s = json.loads((folder / "summary.json").read_text())["wall_s"]
    rows = training_rows(read_jsonl(folder / "metrics.jsonl"))
    # verl's logger writes NaN as null
    accuracy, k3 = (
        [math.nan if (value := row["data"].get(name)) is None else value for row in rows] for name in (REWARD, K3_KL)
    )
    series = (accuracy, k3, metric_values(rows, ESS))
    return RecallOutcome(run, wall_s, *(tuple(float(f"{value:{DIGITS}}") for value in each) for each in series))


def write_table(outcomes: Iterable[RecallOutcome], file: Path) -> None:
    """Write one CSV row per run: its settings, derived values, and each series as numbers separated by spaces."""
    temporary = file.with_suffix(".tmp")
    with temporary.open("w", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow([*SETTINGS, "wall_s", *DERIVED, *SERIES])
        for each in outcomes:
            derived = [f"{getattr(each, name):{DIGITS}}" for name in DERIVED]
            series = [" ".join(f"{value:{DIGITS}}" for value in getattr(each, name)) for name in SERIES]
            table.writerow([*astuple(each.run), f"{each.wall_s:.0f}", *derived, *series])
    temporary.replace(file)


def read_table(file: Path) -> list[RecallOutcome]:
    """Return the outcomes that ``write_table`` wrote; none if there is no file."""
    if not file.exists():
        return []
    with file.open(newline="") as stream:
        return [
            RecallOutcome(
                GridRun(**{name: kind(row[name]) for name, kind in SETTINGS.items()}),
                float(row["wall_s"]),
                *(tuple(map(float, row[name].split())) for name in SERIES),
            )
            for row in csv.DictReader(stream)
        ]


def by_setting(outcomes: Sequence[RecallOutcome], **same: object) -> dict[GridRun, list[RecallOutcome]]:
    """Group the outcomes by their settings, without the seed; ``same`` overrides other fields of the settings."""
    settings: dict[GridRun, list[RecallOutcome]] = {}
    for each in outcomes:
        settings.setdefault(replace(each.run, seed=0, **same), []).append(each)
    return settings


@dataclass(frozen=True)
class Separation:
    """Difference in last accuracy, fp16 minus bf16, over the seeds of one setting.

    Attributes:
        difference: of the means; ``low`` and ``high`` bound its 95 % interval (Welch), None if all values are equal.
        separated: whether fp16's lowest is above bf16's highest by more than the larger of the two ranges.
    """

    difference: float
    low: float | None
    high: float | None
    separated: bool


def separation(outcomes: Sequence[RecallOutcome]) -> Separation | None:
    """Compare the regimes of one setting; None with fewer than ``LEAST_SEEDS`` seeds of one."""
    fp16, bf16 = ([each.last for each in outcomes if each.run.precision == name] for name in ("fp16", "bf16"))
    if min(len(fp16), len(bf16)) < LEAST_SEEDS:
        return None
    spread = max(max(values) - min(values) for values in (fp16, bf16))
    bounds = welch(fp16, bf16, ERROR) if spread else (fmean(fp16) - fmean(bf16), None, None)
    return Separation(*bounds, min(fp16) - max(bf16) > spread)


def separations(outcomes: Sequence[RecallOutcome]) -> dict[GridRun, Separation]:
    """Return the separation of each setting with enough seeds; the run's ``precision`` is empty."""
    found = {run: separation(several) for run, several in by_setting(outcomes, precision="").items()}
    return {run: each for run, each in found.items() if each}


def write_summary(outcomes: Sequence[RecallOutcome], file: Path) -> None:
    """Write two Markdown tables: the settings, with a value per seed, and the separations."""
    header = ["group", "objective", "lift", "tokens", "regime", "seeds", "steps", "T·k3", "ESS/N", "first", "last"]
    rows = []
    for run, several in by_setting(outcomes).items():
        cells = [", ".join(str(each.run.seed) for each in several), run.steps]
        cells.append(", ".join(f"{each.total_k3:.2g}" for each in several))
        cells.append(", ".join(number(each.median_ess, ".2g") for each in several))
        cells.append(", ".join(f"{each.first:.2f}" for each in several))
        cells.append(", ".join(f"{each.last:.2f}" for each in several))
        rows.append([run.group, run.algo, run.lift, run.length + 1, run.precision, *cells])
    lines = [
        "# Runs of the recall task",
        "",
        "Written by `make collapse GRID=configs/compare/collapse.toml`; that file has the overrides of each group.",
        "T·k3: first step, nats per answer. ESS/N: effective sample size of the weights, as a share, median step.",
        f"First, last: mean accuracy of the first {FIRST} and the last {LAST} steps. One value per seed, in order.",
        "",
        *markdown_table(header, rows),
    ]
    if found := separations(outcomes):
        header = ["group", "objective", "lift", "tokens", "fp16 − bf16", "95 % interval", "separated"]
        rows = [
            [run.group, run.algo, run.lift, run.length + 1, f"{each.difference:.2f}"]
            + ["-" if each.low is None else f"{each.low:.2f} to {each.high:.2f}", "yes" if each.separated else "no"]
            for run, each in found.items()
        ]
        lines += [
            "",
            f"Last accuracy in fp16 minus that in bf16, at least {LEAST_SEEDS} seeds each. Interval: Welch's t test,",
            "not corrected for the number of settings. Separated: fp16's lowest is above bf16's highest by more than",
            "the larger range over the seeds.",
            "",
            *markdown_table(header, rows),
        ]
    file.write_text("\n".join(lines) + "\n")
