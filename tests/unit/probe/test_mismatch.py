"""``scripts/verl_precision/probe/mismatch.py`` against verl's own metrics, closed forms and simulation."""

import math

import numpy as np
import pytest
import torch

from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
from verl_precision.probe import mismatch
from verl_precision.probe.mismatch import Answer, Estimate
from verl_precision.probe.report import numbers_of, verdict


def answers_of(log_ratios: list[np.ndarray], samples: int = 8) -> list[Answer]:
    """Return answers with these log-ratios, ``samples`` per prompt."""
    rng = np.random.default_rng(5)
    rollouts = [np.log(rng.uniform(0.05, 1, len(row))) for row in log_ratios]
    return [Answer(at // samples, rollouts[at] + row, rollouts[at]) for at, row in enumerate(log_ratios)]


def independent(scale: float, number: int, length: int, seed: int = 0) -> list[Answer]:
    """Return answers of independent terms with mean weight 1, for which λ = ``scale``²."""
    rng = np.random.default_rng(seed)
    return answers_of([rng.normal(-(scale**2) / 2, scale, length) for _ in range(number)])


def test_metrics_match_those_that_verl_logs():
    rng = np.random.default_rng(0)
    lengths = [7, 20, 13, 20, 1, 16, 9, 20]
    answers = answers_of([rng.normal(0, 0.5, length) for length in lengths], samples=2)
    mask = torch.tensor([[float(at < length) for at in range(20)] for length in lengths])
    padded = lambda rows: torch.tensor([list(row) + [0.0] * (20 - len(row)) for row in rows], dtype=torch.float32)
    trainer, rollout = padded([a.trainer for a in answers]), padded([a.rollout for a in answers])
    theirs = compute_offpolicy_metrics(trainer, rollout, mask)
    ours = mismatch.measure(answers)
    assert ours["k3"].value == pytest.approx(theirs["k3_kl"], rel=1e-4)
    difference = ((trainer.exp() - rollout.exp()).abs() * mask).sum() / mask.sum()  # verl's rollout_probs_diff_mean
    assert ours["equal"].value == 0 and numbers_of(ours)[-1] == "0.00% (0.00%–0.00%)"
    assert ours["probs_diff"].value == pytest.approx(difference.item(), rel=1e-5)


def test_small_mismatch_keeps_its_digits():
    """In fp32, as verl logs it, exp(d) − d − 1 of d = 1e-6 is rounding."""
    result = mismatch.measure(answers_of([np.full(16, 1e-6)] * 16))
    assert result["k3"].value == pytest.approx(5e-13, rel=1e-3)
    assert 0 <= result["rate"].value < 1e-15, "all weights are alike"


@pytest.mark.parametrize("scale", [1e-5, 3e-2])
def test_independent_terms_lose_their_variance(scale):
    result = mismatch.measure(independent(scale, 512, 64))
    assert result["block"] == 64 and result["longest"] == 64
    assert result["rate"].low < scale**2 < result["rate"].high
    assert result["rate"].value == pytest.approx(scale**2, rel=0.25)
    assert result["growth"].low < 1 < result["growth"].high
    for length in (1, 8, 64, 8192):
        share = mismatch.effective_share(result["rate"], length)
        assert share.low < math.exp(-(scale**2) * length) < share.high


def test_extrapolation_matches_longer_answers():
    for length in (32, 1024):
        result = mismatch.measure(independent(0.02, 512, length))
        share = mismatch.effective_share(result["rate"], 1024)
        assert result["block"] == length and share.low < math.exp(-(0.02**2) * 1024) < share.high


def test_correlated_terms_raise_growth():
    rng = np.random.default_rng(1)
    result = mismatch.measure(answers_of([rng.normal(rng.normal(0, 1e-3), 1e-3, 64) for _ in range(512)]))
    assert result["growth"].low > 10, "variance of 64 + 64² terms over that of 2 × 64"
    assert result["growth"].value == pytest.approx(32.5, rel=0.25)


def test_block_is_the_longest_of_which_enough_are_measured():
    for answers, block in ((independent(1e-3, 64, 16), 16), (independent(1e-3, 63, 16), 8)):
        assert mismatch.measure(answers)["block"] == block
    assert mismatch.measure(independent(1e-2, 80, 8) + independent(1e-2, 80, 600))["block"] == 512


def test_loss_rate_is_kishs_of_weights_with_any_mean_clamped_as_by_verl():
    weights = np.array([1.0, 3.0])
    rate = mismatch.loss_rate((weights - 1).sum(), ((weights - 1) ** 2).sum(), 2, 2)
    assert math.exp(-rate) == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / 2)
    assert mismatch.weights(np.array([1.0, 800.0, -800.0])) == pytest.approx(np.expm1([1.0, 20.0, -20.0]))


def test_intervals_cover_the_true_value():
    """Prompts differ in their mismatch, so an interval over tokens would be far too short."""
    rng, hits = np.random.default_rng(4), 0
    for _ in range(100):
        scales = rng.exponential(0.01, 24)  # a prompt's; k3 of a normal d is half its variance
        rows = [rng.normal(0, scale, 10) for scale in scales for _ in range(8)]
        answers = answers_of(rows)
        bootstrap = mismatch.Bootstrap([answer.prompt for answer in answers])
        sums = np.array([mismatch.k3(row).sum() for row in rows])
        result = bootstrap(lambda total, count: total / count, sums, np.array([10] * len(rows)))
        hits += result.low < 0.01**2 < result.high
    assert 0.75 < hits / 100 <= 0.99, "24 prompts of a heavy tail: somewhat below 95 %"


def regime(name: str, k3: tuple, prompts: int = 8) -> dict[str, dict]:
    """Return the row of a regime by its name, as ``verdict`` takes it."""
    value, low, high = k3
    row = {"regime": name, "prompts": prompts, "tokens": 99, "block": 8192, "k3": Estimate(*k3)}
    row |= {"rate": Estimate(2 * value, 2 * low, 2 * high)}
    return {name: row | {"equal": Estimate(*[float(value == 0)] * 3)}}


def test_verdict():
    fp32, fp16 = regime("fp32", (1e-13,) * 3), regime("fp16", (1e-7, 5e-8, 2e-7))
    bf16 = regime("bf16", (1e-5, 8e-6, 2e-5))
    assert verdict(fp32 | bf16 | fp16) == (
        "fp16 mismatches least: k3 1e-07 (5e-08–2e-07) in fp16, 1e-05 (8e-06–2e-05) in bf16; untruncated sequence "
        "weights hold at 8192 tokens in bf16: T·k3 0.082 (0.066–0.16) nats, hold at 8192 tokens in fp16: "
        "T·k3 8.2e-04 (4.1e-04–0.0016) nats"
    )
    lost = verdict(fp16 | regime("bf16", (1e-2, 9e-3, 2e-2)))
    assert lost.endswith("do not hold at 8192 tokens in bf16: T·k3 82 (74–164) nats")
    unclear = verdict(bf16 | regime("fp16", (1e-7, 5e-8, 9e-6)))
    assert unclear.startswith("not decided between fp16 and bf16, whose k3 overlap: k3 1e-07 (5e-08–9e-06) in fp16")
    few = verdict(regime("bf16", (1e-5, 8e-6, 2e-5), prompts=7) | regime("fp16", (1e-7,) * 3, prompts=7))
    assert few.startswith("not decided from 7 prompts, at least 8 are needed: k3 1e-07")
    overflow = verdict(bf16 | {"fp16": {"overflow": "the rollout's logits are not finite in fp16"}})
    assert overflow.startswith("bf16 is the only 16-bit regime that was measured: k3 1e-05")
    assert overflow.endswith("; fp16 overflows: the rollout's logits are not finite in fp16 (make preflight)")
    assert verdict(fp32) == "no 16-bit regime was measured"
    bitwise = verdict(regime("bf16", (0.0, 0.0, 0.0)) | fp16)
    assert bitwise == "bitwise: trainer and rollout have the same log-probabilities of all 99 tokens in bf16"


def test_equal_log_probabilities_are_bitwise_and_neither_grow_nor_cost():
    rows = answers_of([np.zeros(16)] * 16)
    result = mismatch.measure(rows)
    assert numbers_of(result)[-1] == "bitwise" and result["k3"].high == 0
    assert result["growth"] == Estimate(1, 1, 1) and mismatch.effective_share(result["rate"], 8192) == Estimate(1, 1, 1)
    rows[0].trainer[:4] -= 1e-6
    assert mismatch.measure(rows)["equal"].value == 252 / 256
