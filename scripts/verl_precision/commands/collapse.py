"""Train a language model in bf16 and in fp16 with importance weights.

Runs verl's main_ppo with Ray, FSDP and vLLM on the recall task (recipes/recall). Its logits are lifted so that k3 adds
up to 8 nats per answer in bf16. Plots accuracy and k3 of both runs to OUT/collapse.png.

With GRID, run the jobs of that file instead and write their outcomes to OUT/runs.csv, with a summary and two figures
beside it. Jobs in that table are skipped. The table of configs/compare/collapse.toml is in docs/results/collapse; set
OUT to run its jobs again. The same command resumes.

Exit code 0: done, whatever the outcome; 1: refused, or a run failed; 130: interrupted.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.files import check_room
from verl_precision.paths import INSTALLED, OUTPUTS, REPO
from verl_precision.words import alternatives, device, file_path, parse_words, whole_number

sys.path.append(str(REPO))  # for the recipes
from verl_precision.collapse.grid import FEWEST_STEPS, GridRun, load_grid, make_runs

SHIPPED, RESULTS = REPO / "configs/compare/collapse.toml", REPO / "docs/results/collapse"
VARIABLES = {
    "SEED": "seed of the data order and of sampling, default 1",
    "STEPS": "training steps, default 40; without GRID",
    "DEVICE": "cpu or cuda, default: cuda where there is a GPU",
    "OUT": "the folder of the runs, default outputs/collapse",
    "GRID": "a file of jobs to run instead, such as configs/compare/collapse.toml",
    "ONLY": "groups of the grid, separated by commas, default all",
}


@dataclass(frozen=True)
class CollapseOptions:
    """Options of the command line."""

    seed: int
    steps: int
    device: str
    out: Path
    grid: Path | None
    only: tuple[str, ...]
    table: Path


def parse(words: list[str]) -> CollapseOptions:
    """Parse ``NAME=VALUE`` words.

    Raises:
        Refused: a name or a value is not allowed.
    """
    values = parse_words(words, VARIABLES)
    for name in ("SEED", "STEPS") if "GRID" in values else ("ONLY",):
        if name in values:
            why = "cannot be set with GRID, whose file sets it" if "GRID" in values else "can only be set with GRID"
            raise Refused(f"{name}={values[name]}: {why}")
    grid = file_path(values, "GRID")
    if grid and not Path(grid).is_file():
        raise Refused(f"GRID={grid}: there is no such file")
    out = Path(file_path(values, "OUT") or OUTPUTS / "collapse").resolve()
    shipped = grid and Path(grid).resolve() == SHIPPED and not INSTALLED
    results = RESULTS if shipped and "OUT" not in values else out
    for folder in (out, results):
        check_room(folder)
    return CollapseOptions(
        seed=whole_number(values, "SEED", 0, 1),
        steps=whole_number(values, "STEPS", FEWEST_STEPS, 40),
        device=device(values),
        out=out,
        grid=Path(grid) if grid else None,
        only=tuple(name.strip() for name in values.get("ONLY", "").split(",") if name.strip()),
        table=results / "runs.csv",
    )


def compare_pair(options: CollapseOptions) -> int:
    """Train in bf16 and in fp16, plot both, and print the outcome. Return the exit code."""
    from verl_precision.collapse.figures import draw_curves
    from verl_precision.collapse.outcomes import read_outcome
    from verl_precision.collapse.sentences import sentences

    runs = [GridRun("collapse", regime, options.seed, steps=options.steps) for regime in ("bf16", "fp16")]
    if code := make_runs(runs, options.out, options.device).code:
        return code
    outcomes = [read_outcome(run, options.out / run.name) for run in runs]
    draw_curves(outcomes, options.out / "collapse.png")
    print("\n" + "\n".join(sentences(*outcomes)) + f"\n\n  {options.out / 'collapse.png'}")
    return 0


def make_grid(options: CollapseOptions) -> int:
    """Make the runs of a grid that have no outcome in the table. Return the exit code."""
    from verl_precision.collapse.figures import draw_curves, draw_threshold
    from verl_precision.collapse.outcomes import read_outcome, read_table, separations, write_summary, write_table

    grid = load_grid(options.grid)
    groups = list(dict.fromkeys(run.group for run in grid))
    for name in options.only:
        if name not in groups:
            raise Refused(f"ONLY={name}: {alternatives(name, groups, 'groups')}")
    known = {each.run: each for each in read_table(options.table)}
    ahead = [run for run in grid if run not in known and (not options.only or run.group in options.only)]
    print(f"{len(known)} runs have an outcome in {options.table}", flush=True)
    sweep = make_runs(ahead, options.out, options.device)
    folders = {folder for pairs in sweep.finished.values() for _, folder in pairs}
    made = [run for run in ahead if options.out / run.name in folders]
    known |= {run: read_outcome(run, options.out / run.name) for run in made}
    outcomes = [known[run] for run in grid if run in known] + [known[run] for run in known if run not in grid]
    options.table.parent.mkdir(parents=True, exist_ok=True)
    write_table(outcomes, options.table)
    write_summary(outcomes, options.table.with_suffix(".md"))
    if first := [each for each in outcomes if each.run.group == groups[0]]:
        draw_curves(first, options.table.with_name("curves.png"))
        draw_threshold(outcomes, options.table.with_name("threshold.png"))
    for run, each in separations(outcomes).items():
        name = f"{run.group}, {run.algo}, lift {run.lift}, {run.length} tokens"
        print(f"{name}: fp16 and bf16 are {'' if each.separated else 'not '}separated")
    print(f"\n  {options.table}")
    return sweep.code


def main(words: list[str]) -> int:
    options = parse(words)
    return make_grid(options) if options.grid else compare_pair(options)
