"""Train a language model in bf16 and in fp16 with importance weights: ``scripts/collapse.py [NAME=VALUE ...]``.

Runs verl's main_ppo with Ray, FSDP and vLLM on the recall task (recipes/recall). Its logits are lifted so that k3 adds
up to 8 nats per answer in bf16. Shows the progress of both runs and plots accuracy and k3 to OUT/collapse.png.

With GRID, makes the runs of that file instead and writes their outcomes to TABLE, with two figures beside it. Runs that
are in TABLE are not repeated. The same command resumes. Exit code 0: done, whatever the outcome; 1: refused, or a run
failed; 130: interrupted.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from lib import cli
from lib.errors import Refused
from lib.files import check_room
from lib.paths import REPO
from lib.process import interrupt_on_signals

RESULTS = REPO / "docs/results/collapse"
GIB_PER_RUN = 9  # of memory that must be free for a second run beside the first
VARIABLES = {
    "SEED": "of the data order and of sampling, default 1",
    "STEPS": "training steps, default 60; without GRID",
    "PARALLEL": "runs side by side, default 2 on a CPU with memory for both, else 1",
    "DEVICE": "default: a GPU where there is one: cpu, cuda",
    "OUT": "the folder of the runs, default outputs/collapse",
    "GRID": "a file of runs to make instead, such as configs/compare/collapse.toml",
    "ONLY": "groups of the grid, separated by commas, default all",
    "TABLE": "with GRID, the table of outcomes, default docs/results/collapse/runs.csv",
}


@dataclass(frozen=True)
class CollapseOptions:
    """Options of the command line."""

    seed: int
    steps: int
    parallel: int | None
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
    values = cli.parse_words(words, VARIABLES)
    for name in ("SEED", "STEPS") if "GRID" in values else ("ONLY", "TABLE"):
        if name in values:
            raise Refused(f"{name}={values[name]}: is set {'by the file of' if 'GRID' in values else 'only with'} GRID")
    grid = cli.file_path(values, "GRID")
    if grid and not Path(grid).is_file():
        raise Refused(f"GRID={grid}: there is no such file")
    out = Path(cli.file_path(values, "OUT") or REPO / "outputs/collapse").resolve()
    check_room(out)
    return CollapseOptions(
        seed=cli.whole_number(values, "SEED", 0, 1),
        steps=cli.whole_number(values, "STEPS", 20, 60),
        parallel=cli.whole_number(values, "PARALLEL", 1, None),
        device=cli.device(values),
        out=out,
        grid=Path(grid) if grid else None,
        only=tuple(name.strip() for name in values.get("ONLY", "").split(",") if name.strip()),
        table=Path(cli.file_path(values, "TABLE") or RESULTS / "runs.csv"),
    )


def side_by_side(options: CollapseOptions) -> int:
    """Return how many runs to make at a time."""
    import psutil

    if options.parallel:
        return options.parallel
    roomy = psutil.virtual_memory().available > 2 * GIB_PER_RUN * 2**30
    return 2 if options.device == "cpu" and roomy else 1


def compare_pair(options: CollapseOptions) -> int:
    """Train in bf16 and in fp16, draw both, and print what the outcome is. Return the exit code."""
    from lib.collapse.figures import draw_curves
    from lib.collapse.grid import GridRun
    from lib.collapse.make_runs import make_runs
    from lib.collapse.outcomes import read_outcome
    from lib.collapse.sentences import sentences

    runs = [GridRun("collapse", regime, options.seed, steps=options.steps) for regime in ("bf16", "fp16")]
    missing = [run for run in runs if not (options.out / run.name / "summary.json").exists()]
    parallel = side_by_side(options)
    how = "side by side" if parallel > 1 else "one after the other"
    print(f"{len(missing)} of {len(runs)} runs of {options.steps} steps ahead, {how}, in {options.out}", flush=True)
    if make_runs(missing, options.out, options.device, parallel, lambda run: None):
        return 1
    outcomes = [read_outcome(run, options.out / run.name) for run in runs]
    draw_curves(outcomes, options.out / "collapse")
    print("\n" + "\n".join(sentences(*outcomes)) + f"\n\n  {options.out / 'collapse.png'}")
    return 0


def make_grid(options: CollapseOptions) -> int:
    """Make the runs of a grid that have no outcome in the table. Return the exit code."""
    from lib.collapse.figures import draw_curves, draw_threshold
    from lib.collapse.grid import load_grid
    from lib.collapse.make_runs import make_runs
    from lib.collapse.outcomes import read_outcome, read_table, write_table

    grid = load_grid(options.grid)
    groups = list(dict.fromkeys(run.group for run in grid))
    for name in options.only:
        if name not in groups:
            raise Refused(f"ONLY={name}: {cli.alternatives(name, groups, 'groups')}")
    known = {each.run: each for each in read_table(options.table)}
    options.table.parent.mkdir(parents=True, exist_ok=True)

    def record(run) -> None:
        known[run] = read_outcome(run, options.out / run.name)
        ordered = [known[each] for each in grid if each in known]
        write_table([*ordered, *(each for each in known.values() if each.run not in grid)], options.table)

    for run in grid:
        if run not in known and (options.out / run.name / "summary.json").exists():
            record(run)
    ahead = [run for run in grid if run not in known and (not options.only or run.group in options.only)]
    print(f"{len(ahead)} of {len(grid)} runs ahead, in {options.out}", flush=True)
    failed = make_runs(ahead, options.out, options.device, side_by_side(options), record)
    outcomes = list(known.values())
    draw_curves([each for each in outcomes if each.run.group == groups[0]], options.table.with_name("curves"))
    draw_threshold(outcomes, options.table.with_name("threshold"))
    print(f"\n  {options.table}")
    return 1 if failed else 0


def main(words: list[str]) -> int:
    if cli.help_requested(words):
        print(f"{__doc__}\n{cli.usage(VARIABLES)}")
        return 0
    options = parse(words)
    interrupt_on_signals()
    return make_grid(options) if options.grid else compare_pair(options)


if __name__ == "__main__":
    with cli.faults_in_one_line("collapse"):
        sys.exit(main(sys.argv[1:]))
