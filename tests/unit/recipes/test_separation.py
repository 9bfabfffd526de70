"""The toy problem of docs/results/sanity-search.md: its arithmetic and its recorded conclusions."""

import csv
import math
import sys

import pytest
import torch

from lib.paths import REPO
from recipes.separation import toy

SETTINGS = {"steps": 40, "lr": 0.02, "offset": 32.0}
COMMITTED = REPO / "docs/results/separation.csv"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_and_gradients_are_rounded(dtype):
    x = torch.randn(100, requires_grad=True)
    gradient = torch.randn(100)
    toy.rounded(x, dtype).backward(gradient)
    assert toy.rounded(x, dtype).equal(x.to(dtype).float()) and x.grad.equal(gradient.to(dtype).float())


def test_trainer_and_rollout_agree_in_fp32():
    x, weight, _, _ = toy.problem(32, 32.0)
    exact = x.double() @ weight.double().T
    for logits in (toy.trainer_logits, toy.rollout_logits):
        torch.testing.assert_close(logits(x, weight, torch.float32).double(), exact, rtol=1e-6, atol=1e-4)


def test_the_offset_changes_no_probability():
    probabilities = [
        torch.softmax(x @ weight.T, -1) for x, weight, _, _ in (toy.problem(32, 0.0), toy.problem(32, 32.0))
    ]
    torch.testing.assert_close(*probabilities, rtol=1e-4, atol=1e-6)


def test_one_third_of_the_initial_answers_are_right():
    x, weight, keys, right = toy.problem(64, 32.0)
    probability = torch.softmax(x[:, keys] @ weight.T, -1).gather(-1, right[..., None]).prod(1).mean().item()
    assert 0.25 < probability < 0.5


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


def test_the_effective_share_follows_from_length_and_k3():
    """Log weights of variance v leave exp(-v) of the sample, and v is twice length times k3."""
    row = toy.run("grpo", 64, "bf16", 1, steps=20, lr=0.0, offset=32.0)
    assert row["ess"] == pytest.approx(math.exp(-2 * row["length_k3"]), rel=0.25)


def test_run_is_deterministic():
    assert toy.run("pg_is", 32, "bf16", 1, **SETTINGS) == toy.run("pg_is", 32, "bf16", 1, **SETTINGS)


def test_objectives_weight_as_named():
    weights = torch.tensor([0.5, 1.0, 3.0])
    assert [weigh(weights).tolist() for weigh in toy.OBJECTIVES.values()] == [[0.5, 1, 3], [0.5, 1, 2], [1, 1, 1]]


def test_repeated_command_resumes(tmp_path, monkeypatch, capsys):
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


def test_too_short_length_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["toy", "--out", str(tmp_path / "new"), "--lengths", "8"])
    with pytest.raises(SystemExit, match="--lengths: 8 must be at least 16, the tokens that decide"):
        toy.main()
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def committed() -> dict[tuple[str, str, str], list[float]]:
    """Return the recorded accuracies of the last ten steps by objective, length and regime, at the default offset."""
    accuracies: dict[tuple[str, str, str], list[float]] = {}
    with COMMITTED.open() as file:
        for row in csv.DictReader(file):
            if row["offset"] == "32.0":
                accuracies.setdefault((row["objective"], row["length"], row["regime"]), []).append(float(row["last"]))
    return accuracies


def test_untruncated_weights_alone_separate_the_regimes(committed):
    """Over every pair of seeds."""
    for length in ("256", "1024"):
        fp16, bf16 = (committed["pg_is", length, regime] for regime in ("fp16", "bf16"))
        assert len(fp16) == len(bf16) == 3 and max(bf16) < min(fp16) - 0.25
    for length in ("64", "256"):
        fp16, bf16 = (committed["grpo", length, regime] for regime in ("fp16", "bf16"))
        assert len(fp16) == len(bf16) == 3 and abs(sum(bf16) - sum(fp16)) / 3 < 0.05


def test_recorded_row_is_reproduced():
    with COMMITTED.open() as file:
        row = next(row for row in csv.DictReader(file) if (row["length"], row["regime"]) == ("64", "bf16"))
    settings = {"steps": int(row["steps"]), "lr": float(row["lr"]), "offset": float(row["offset"])}
    again = toy.run(row["objective"], int(row["length"]), row["regime"], int(row["seed"]), **settings)
    assert again["last"] == pytest.approx(float(row["last"]), abs=0.05)  # sums differ between kinds of CPU
