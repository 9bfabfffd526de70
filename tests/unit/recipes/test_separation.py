"""The toy problem of docs/results/sanity-search.md: its arithmetic and its command."""

import csv
import math
import sys

import pytest
import torch

from lib.paths import REPO
from recipes.separation import toy


def test_mismatch_depends_on_significant_bits_and_offset():
    k3 = {
        (regime, offset): toy.run("grpo", 64, regime, 1, steps=3, lr=0.0, offset=offset)["k3"]
        for regime in toy.REGIMES
        for offset in (0.0, 32.0)
    }
    assert abs(k3["fp32", 32.0]) < 1e-8
    assert 30 < k3["bf16", 32.0] / k3["fp16", 32.0] < 130  # bf16 lacks three bits, whose square is 64
    assert k3["bf16", 32.0] > 30 * k3["bf16", 0.0]
    assert k3["bf16_train_fp16_infer", 32.0] > 10 * k3["fp16", 32.0]


def test_objectives_weight_as_named():
    weights = torch.tensor([0.5, 1.0, 3.0])
    assert [weigh(weights).tolist() for weigh in toy.OBJECTIVES.values()] == [[0.5, 1, 3], [0.5, 1, 2], [1, 1, 1]]


def test_repeated_command_resumes_and_too_short_a_length_is_refused(tmp_path, monkeypatch, capsys):
    command = ["toy", "--out", str(tmp_path), "--lengths", "16", "--seeds", "1", "--steps", "11", "--regimes", "bf16"]
    monkeypatch.setattr(sys, "argv", [*command, "--objectives", "pg_is"])
    toy.main()
    first = (tmp_path / "separation.csv").read_text()
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", command)
    toy.main()
    assert "pg_is " not in capsys.readouterr().out
    assert (tmp_path / "separation.csv").read_text().startswith(first)
    with open(tmp_path / "separation.csv") as file:
        assert [row["objective"] for row in csv.DictReader(file)] == ["pg_is", "pg_tis", "grpo"]
    assert (tmp_path / "separation.png").stat().st_size > 10_000
    monkeypatch.setattr(sys, "argv", ["toy", "--out", str(tmp_path / "new"), "--lengths", "8"])
    with pytest.raises(SystemExit, match="--lengths: 8 must be at least 16, the tokens that decide"):
        toy.main()
    assert not (tmp_path / "new").exists()


def test_recorded_row_is_reproduced():
    """Log weights of variance v leave exp(-v) of the sample, and v is twice length times k3."""
    with (REPO / "docs/results/separation.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if (row["length"], row["regime"]) == ("64", "bf16"))
    settings = {"steps": int(row["steps"]), "lr": float(row["lr"]), "offset": float(row["offset"])}
    again = toy.run(row["objective"], int(row["length"]), row["regime"], int(row["seed"]), **settings)
    for name in ("first", "last", "k3", "ess"):  # sums differ between kinds of CPU
        assert again[name] == pytest.approx(float(row[name]), rel=0.05)
    assert again["ess"] == pytest.approx(math.exp(-2 * again["length_k3"]), rel=0.25)
