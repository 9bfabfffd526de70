"""``scripts/bench.py`` runs, counts and writes; timings are not asserted, since machines are noisy."""

import csv
import itertools
import subprocess
import sys

import pytest

import bench
from lib.bench.cost_report import timings_of
from lib.bench.interleave import rounds
from lib.bench.ranks import spawn
from lib.bench.training_step import measure_training
from lib.run.job import CPU_PLATFORM


@pytest.mark.subprocess
def test_optimizer_steps_are_timed_and_reported(tmp_path):
    run = [sys.executable, bench.__file__, "--sizes", "1", "--ranks", "2", "--seconds", "0.1", "--out", tmp_path]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    report = (tmp_path / "cost-cpu.md").read_text()
    for optimizer in ("foreach AdamW", "fused AdamW"):
        assert f"| {optimizer} | 1 | 2 |" in report
        assert f"{optimizer}, 1 M, 2 rank(s)" in done.stdout
    assert "Not measured: no CUDA device." in report
    # Bytes are the same on any machine: fp16 moves no more than bf16, and fused AdamW little more than the 32 it needs.
    assert "| foreach AdamW | 96.0 | 96.0 | 104.0 | 96.0 |" in report
    assert "| fused AdamW | 44.0 | 36.0 | 52.0 | 44.0 |" in report
    rows = list(csv.DictReader((tmp_path / "cost-cpu.csv").open()))
    assert len(rows) == 2 * 4
    assert all(int(row["rounds"]) >= 41 for row in rows), "even where the time is over before"
    assert (tmp_path / "cost-cpu.png").stat().st_size > 1000


@pytest.mark.subprocess
def test_training_step_runs_in_every_regime(monkeypatch):
    for name, value in {**CPU_PLATFORM, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    rows = spawn(measure_training, 1, 0.1, "cpu", 1, 32)
    assert [row.regime for row in rows] == ["bf16", "fp16", "fp32"]
    assert {row.what for row in rows} == {"training step"} and rows[0].ratio == 1.0


def test_sizes_must_be_whole_numbers_above_zero(capsys):
    assert bench.parse(["--ranks", "1,2"]).ranks == [1, 2]
    with pytest.raises(SystemExit, match="2"):
        bench.parse(["--sizes", "0"])
    assert "whole numbers above 0" in capsys.readouterr().err


def test_take_is_timed_until_the_device_is_done():
    calls = []
    takes = {name: lambda name=name: calls.append(name) for name in "ab"}
    timed = rounds(takes, lambda: calls.append("wait"), lambda name: calls.append(f"prepare {name}"))
    orders = ["".join(times) for times in itertools.islice(timed, 20)]
    expected = [f"prepare {name},wait,{name},wait" for order in orders for name in order]
    assert ",".join(calls) == ",".join(expected) and set(orders) == {"ab", "ba"}


def test_ratio_is_the_median_over_the_rounds():
    times = {"bf16": [1.0, 2.0, 3.0], "fp16": [3.0, 1.0, 2.25]}
    bf16, fp16 = timings_of(times, what="optimizer step", optimizer="foreach AdamW", parameters_m=1, ranks=1)
    assert (bf16.ratio, bf16.seconds, fp16.ratio, fp16.seconds, fp16.rounds) == (1.0, 2.0, 0.75, 2.25, 3)
