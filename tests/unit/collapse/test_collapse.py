"""``make collapse``: the runs of its grids, their outcomes and tables, what it prints and draws."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from verl_precision.collapse import grid
from verl_precision.collapse.figures import draw_curves, draw_threshold
from verl_precision.collapse.grid import GridRun, load_grid
from verl_precision.collapse.outcomes import (
    RecallOutcome,
    read_outcome,
    read_table,
    separation,
    separations,
    write_summary,
    write_table,
)
from verl_precision.collapse.sentences import sentences
from verl_precision.commands import collapse
from verl_precision.errors import Refused
from verl_precision.files import write
from verl_precision.paths import CONFIGS
from verl_precision.run.job import parse_job
from verl_precision.run.sweep import SweepOutcome

GRID = CONFIGS / "compare/collapse.toml"


def outcome(precision="bf16", seed=1, accuracy=(0.4,) * 20, k3=0.06, **settings) -> RecallOutcome:
    run = GridRun("some group", precision, seed, **settings)
    return RecallOutcome(run, 400.0, tuple(accuracy), (k3,) * len(accuracy), (0.05,) * len(accuracy))


def falling(last: float) -> list[float]:
    """Return the accuracies of twenty steps, .4 in the first ten and ``last`` after them."""
    return [0.4] * 10 + [last] * 10


def finish(folder: Path, rows: list[dict]) -> Path:
    """Write what a finished run leaves of its metrics and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text('{"wall_s": 12.5}')
    return folder


@pytest.fixture
def prepared(tmp_path, monkeypatch) -> Callable[[GridRun], GridRun]:
    """A function that makes the folder of a run's model and data, empty but present."""
    monkeypatch.setattr(grid, "CACHE", tmp_path / "cache")

    def prepare(run: GridRun) -> GridRun:
        for name, content in {"model/config.json": b"{}", "train.parquet": b"PAR1", "val.parquet": b"PAR1"}.items():
            write(run.prepared / name, content)
        return run

    return prepare


def test_every_run_of_the_shipped_grid_has_words_that_make_run_takes(tmp_path, prepared):
    for run in map(prepared, load_grid(GRID)):
        job = parse_job(run.words(tmp_path, "cpu"))
        assert (job.experiment, job.seed, job.steps, job.precision) == ("recall", run.seed, run.steps, run.precision)
        assert str(run.length) in job.model and str(run.lift) in job.model and job.out.is_relative_to(tmp_path)
        assert run.args in " ".join(job.args)


def test_lists_of_a_group_stand_for_one_run_each_and_every_setting_comes_before_a_second_seed(tmp_path):
    file = tmp_path / "grid.toml"
    group = '[[group]]\nname = "a b"\nPRECISION = ["bf16", "fp16"]\nSEED = [2, 3]\nlift = 0\nSTEPS = 20\n'
    file.write_text(f"{group}[[group]]\nname = 'c'\nSEED = 7\n")
    runs = load_grid(file)
    order = [("a b", 2, "bf16"), ("a b", 2, "fp16"), ("c", 7, "bf16"), ("a b", 3, "bf16"), ("a b", 3, "fp16")]
    assert [(run.group, run.seed, run.precision) for run in runs] == order
    assert {(run.lift, run.length, run.steps) for run in runs if run.group == "a b"} == {(0, 128, 20)}
    assert runs[0].name == "a-b/pg_is-lift0-length128-bf16-seed2"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"a = [", "is not a readable TOML file"),
        (b"a = '\xff'", "is not a readable TOML file"),
        (b"", r"must have a \[\[group\]\] table"),
        (b"[group]\nname = 'a'", r"must have a \[\[group\]\] table"),
        (b"group = [1]", r"must have a \[\[group\]\] table"),
        (b"[[group]]\nPRECISION = 'bf16'", "name=None in the group None: must be a text$"),
        (b"[[group]]\nname = '+'", "name=. in the group .: must contain a letter or a digit"),
        (b"[[group]]\nname = 'a, b'", "name=a, b in the group a, b: must not contain a comma"),
        (b"[[group]]\nname = 'a'\nLR = 1", "LR is not a key of .* the keys are name, lift, length, ALGO"),
        (b"[[group]]\nname = 'a'\nlift = 0.5", "lift=0.5 in the group a: must be a whole number, or a list of these"),
        (b"[[group]]\nname = 'a'\nlift = [3, -5]", "lift=-5 in the group a: must be at least 0"),
        (b"[[group]]\nname = 'a'\nlength = 100", "length=100 in the group a: must be a multiple of 16 from 32 to 1008"),
        (b"[[group]]\nname = 'a'\nSTEPS = 19", "STEPS=19 in the group a: must be at least 20"),
        (b"[[group]]\nname = 'a'\nPRECISION = 'fp8'", "PRECISION=fp8 in the group a: must be one of bf16, bf16_train"),
        (b"[[group]]\nname = 'a'\nALGO = []", r"ALGO=\[\] in the group a"),
        (b"[[group]]\nname = 'a'\n[[group]]\nname = 'A'", "two runs would share the folder a/pg_is-lift160"),
    ],
)
def test_bad_grid_is_refused(text, reason, tmp_path):
    file = tmp_path / "grid.toml"
    file.write_bytes(text)
    with pytest.raises(Refused, match=reason):
        load_grid(file)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["STEPS=19"], "STEPS=19: must be a whole number of at least 20"),
        (["GRID=nowhere.toml"], "there is no such file"),
        ([f"GRID={GRID}", "STEPS=30"], "STEPS=30: cannot be set with GRID"),
        (["ONLY=noise"], "ONLY=noise: can only be set with GRID"),
        (["LIFT=3"], "LIFT: is not a variable of this command"),
    ],
)
def test_bad_words_are_refused(words, reason):
    with pytest.raises(Refused, match=reason):
        collapse.parse(words)


def test_unknown_group_is_refused_before_anything_starts(tmp_path):
    words = [f"GRID={GRID}", "ONLY=nois", f"OUT={tmp_path / 'out'}"]
    with pytest.raises(Refused, match="ONLY=nois: did you mean noise?"):
        collapse.main(words)
    assert not list(tmp_path.iterdir())


def test_table_keeps_the_outcomes(tmp_path):
    several = [outcome(accuracy=falling(0.0)), outcome("fp16", args="a=1 b=2", lift=0)]
    several.append(replace(outcome(algo="grpo"), ess=()))
    write_table(several, tmp_path / "runs.csv")
    assert read_table(tmp_path / "runs.csv") == several and read_table(tmp_path / "none.csv") == []


def test_summary_has_a_line_per_setting_with_a_value_per_seed(tmp_path):
    several = [outcome(seed=seed, accuracy=falling(seed / 10)) for seed in (1, 2)] + [outcome("fp16", k3=0.001)]
    write_summary(several, tmp_path / "runs.md")
    bf16, fp16 = (tmp_path / "runs.md").read_text().splitlines()[-2:]
    assert bf16 == (
        "| some group | pg_is | 160 | 129 | bf16 | 1, 2 | 60 | 7.7, 7.7 | 0.05, 0.05 | 0.40, 0.40 | 0.10, 0.20 |"
    )
    assert "| fp16 | 1 | 60 | 0.13 |" in fp16


def test_outcome_is_read_from_the_metrics_of_a_run(tmp_path):
    names = {"critic/score/mean": 0.25, "rollout_corr/k3_kl": 0.01, "rollout_corr/rollout_is_eff_sample_size": 0.5}
    rows = [{"step": step, "data": names | {"critic/score/mean": step / 4}} for step in (1, 2)]
    run = GridRun("a", "bf16", 1, length=64)
    read = read_outcome(run, finish(tmp_path, rows))
    assert read == RecallOutcome(run, 12.5, (0.25, 0.5), (0.01, 0.01), (0.5, 0.5))
    assert (read.first, read.last, read.total_k3) == (0.375, 0.375, 0.65)


def test_table_is_the_same_when_it_is_written_again(tmp_path):
    rows = [{"step": step, "data": {"critic/score/mean": step / 3, "rollout_corr/k3_kl": 1.23449}} for step in (1, 2)]
    table = tmp_path / "runs.csv"
    write_table([read_outcome(GridRun("a", "bf16", 1, length=992), finish(tmp_path, rows))], table)
    before = table.read_text()
    write_table(read_table(table), table)
    assert table.read_text() == before


def test_metrics_that_are_not_finite_are_kept_and_left_out_of_figures(tmp_path):
    """verl logs NaN as null, and its estimate of a k3 near 0 may be negative."""
    rows = [{"step": step, "data": {"critic/score/mean": 0.5, "rollout_corr/k3_kl": None}} for step in (1, 2)]
    rows += [
        {"step": at, "data": {"critic/score/mean": 0.5, "rollout_corr/k3_kl": k3}} for at, k3 in ((3, 2.0), (4, -1.0))
    ]
    rows.append({"step": 5, "data": {"critic/score/mean": 0.5}})
    read = read_outcome(GridRun("a", "fp32", 1), finish(tmp_path, rows))
    assert [math.isnan(value) for value in read.k3] == [True, True, False, False, True] and read.median_k3 == 0.5
    write_table([read], tmp_path / "runs.csv")
    write_summary([read], tmp_path / "runs.md")
    (again,) = read_table(tmp_path / "runs.csv")
    assert str(again.k3) == str(read.k3), "NaN is not equal to itself"
    for draw in (draw_curves, draw_threshold):
        draw([read], tmp_path / "figure.png")


@pytest.mark.parametrize(
    ("bf16", "fp16", "expected"),
    [
        ((0.0, 0.1, 0.0), (0.9, 0.8, 0.95), True),
        ((0.0, 0.7, 0.0), (0.9, 0.8, 0.95), False),  # .1 apart, .7 of spread
        ((0.9, 0.9, 0.9), (0.1, 0.1, 0.1), False),
        ((0.0, 0.0), (0.9, 0.9, 0.9), None),
    ],
)
def test_separation_needs_three_seeds_and_a_gap_above_their_spread(bf16, fp16, expected):
    runs = [outcome("bf16", seed, falling(last)) for seed, last in enumerate(bf16)]
    runs += [outcome("fp16", seed, falling(last)) for seed, last in enumerate(fp16)]
    found = separation(runs)
    assert (found and found.separated) is expected
    if found and found.low is not None:
        assert found.low < found.difference < found.high
        assert found.difference == pytest.approx(sum(fp16) / 3 - sum(bf16) / 3)


def test_settings_of_one_group_are_compared_one_by_one(tmp_path):
    lasts = {("bf16", 64): (0.0, 0.1), ("fp16", 64): (0.8, 0.9), ("bf16", 16): (0.9, 0.8), ("fp16", 16): (0.9, 0.8)}
    runs = [
        outcome(regime, seed, falling(last[seed % 2]), lift=lift)
        for (regime, lift), last in lasts.items()
        for seed in range(3)
    ]
    assert {run.lift: each.separated for run, each in separations(runs).items()} == {64: True, 16: False}
    write_summary(runs, tmp_path / "runs.md")
    lines = (tmp_path / "runs.md").read_text().splitlines()
    assert "| some group | pg_is | 64 | 129 | 0.80 | 0.67 to 0.93 | yes |" in lines and lines[-1].endswith("| no |")


@pytest.mark.parametrize(("last", "verb"), [(0.0, "collapsed"), (0.3, "did not rise"), (0.41, "rose"), (0.9, "rose")])
def test_sentences_describe_the_course_and_its_limits(last, verb):
    lines = sentences(outcome(accuracy=falling(last)), outcome("fp16", accuracy=falling(0.95), k3=0.001))
    assert len(lines) == 3 and f"{verb} in bf16 (0.40 to {last:.2f}) and rose in fp16 (0.40 to 0.95)" in lines[0]
    assert "7.7 nats in bf16 and 0.13 in fp16" in lines[1] and "one seed of a constructed case" in lines[2]


def test_shipped_grid_has_these_weights():
    """They are the markers of the figure."""
    assert {run.weighting: run.group for run in reversed(load_grid(GRID))} == {
        "sequence-level weights": "outcome",
        "no weights": "trainer's own log-probs",
        "sequence-level weights, truncated": "truncated per answer",
        "token-level weights, truncated": "truncated per token",
        "sequence-level weights, smaller learning rate": "learning rate 1e-4",
    }


def test_figures_are_drawn(tmp_path):
    several = [outcome(seed=seed) for seed in (1, 2)] + [outcome("fp16"), outcome(lift=0, accuracy=[0.5] * 5)]
    for name, draw in {"curves": draw_curves, "threshold": draw_threshold}.items():
        draw(several, tmp_path / f"{name}.png")
        draw(several[:3], tmp_path / "fewer.png")
        assert (tmp_path / f"{name}.png").read_bytes() != (tmp_path / "fewer.png").read_bytes(), "every run is drawn"


@pytest.mark.subprocess  # the command run imports verl
def test_refused_run_is_refused_before_any_starts(tmp_path, prepared, monkeypatch):
    monkeypatch.setattr(GridRun, "prepare_command", lambda self: ["true"])
    run = prepared(GridRun("a", "bf16", 1, args="no_such_key=1"))
    with pytest.raises(Refused, match="no_such_key"):
        grid.make_runs([run], tmp_path / "out", "cpu")
    assert not (tmp_path / "out").exists()


def rows_of(accuracy: list[float], k3: float) -> list[dict]:
    """Return the metrics of a run."""
    names = ("critic/score/mean", "rollout_corr/k3_kl")
    return [{"step": at, "data": dict(zip(names, (value, k3), strict=True))} for at, value in enumerate(accuracy, 1)]


@pytest.fixture
def swept(monkeypatch) -> Callable[[int, int], None]:
    """A function that puts the first ``number`` runs of each sweep in place of those that train, with an exit code."""

    def replace_sweep(number: int, code: int) -> None:
        def sweep(plan) -> SweepOutcome:
            for run in plan.runs[:number]:
                regime = "fp16" if "-fp16-" in run.out.name else "bf16"
                finish(run.out, rows_of(falling(0.9 if regime == "fp16" else 0.0), 1e-3))
            finished = [("", run.out) for run in plan.runs[:number]]
            return SweepOutcome({"pg_is": finished}, list(plan.runs[number:]) if code == 1 else [], code == 130)

        monkeypatch.setattr(grid, "run_sweep", sweep)
        monkeypatch.setattr(grid, "find_finished", lambda code, runs: [])
        monkeypatch.setattr(GridRun, "prepare_command", lambda self: ["true"])

    return replace_sweep


@pytest.mark.parametrize(("number", "code"), [(3, 130), (3, 1), (6, 0)])
def test_finished_runs_enter_the_table_however_the_sweep_ends(number, code, tmp_path, swept):
    file = tmp_path / "grid.toml"
    file.write_text('[[group]]\nname = "a"\nPRECISION = ["bf16", "fp16"]\nSEED = [1, 2, 3]\n')
    swept(number, code)
    words = [f"GRID={file}", f"OUT={tmp_path / 'out'}", "DEVICE=cpu"]
    assert collapse.main(words) == code
    assert [each.run for each in read_table(tmp_path / "out/runs.csv")] == load_grid(file)[:number]
    swept(6, 0)
    assert collapse.main(words) == 0
    assert [each.run for each in read_table(tmp_path / "out/runs.csv")] == load_grid(file), "the others are made"


def test_pair_is_drawn_and_described(tmp_path, capsys, swept):
    swept(2, 0)
    words = ["SEED=3", "STEPS=20", f"OUT={tmp_path}", "DEVICE=cpu"]
    assert collapse.main(words) == 0
    assert "collapsed in bf16 (0.40 to 0.00) and rose in fp16 (0.40 to 0.90)" in capsys.readouterr().out
    assert (tmp_path / "collapse.png").exists()
    swept(1, 1)
    (tmp_path / "collapse.png").unlink()
    assert collapse.main(words) == 1 and not (tmp_path / "collapse.png").exists()
    assert "failed: pg_is fp16" in capsys.readouterr().out


def test_shipped_table_is_that_of_the_shipped_grid_unless_out_is_given(tmp_path):
    assert collapse.parse([f"GRID={GRID}"]).table == collapse.RESULTS / "runs.csv"
    assert collapse.parse([f"GRID={GRID}", f"OUT={tmp_path}"]).table == tmp_path / "runs.csv"


def test_grid_whose_runs_are_finished_is_summarized(tmp_path, capsys, monkeypatch):
    file = tmp_path / "grid.toml"
    file.write_text('[[group]]\nname = "a"\nPRECISION = ["bf16", "fp16"]\nSEED = [1, 2, 3]\n')
    last = {"bf16": 0.0, "fp16": 0.9}
    known = [replace(outcome(accuracy=falling(last[run.precision])), run=run) for run in load_grid(file)]
    write_table(known, tmp_path / "runs.csv")
    monkeypatch.setattr(grid, "run_sweep", lambda plan: SweepOutcome({}, [], False))
    assert collapse.main([f"GRID={file}", f"OUT={tmp_path}", "DEVICE=cpu"]) == 0
    assert "a, pg_is, lift 160, 128 tokens: fp16 and bf16 are separated" in capsys.readouterr().out
    assert read_table(tmp_path / "runs.csv") == known and (tmp_path / "curves.png").exists()
    text = (tmp_path / "runs.md").read_text()
    assert "| a | pg_is | 160 | 129 | bf16 | 1, 2, 3 |" in text and "| a | pg_is | 160 | 129 | 0.90 | - | yes |" in text
