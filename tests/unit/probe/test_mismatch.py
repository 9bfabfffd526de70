"""``scripts/verl_precision/probe/mismatch.py`` against verl's own metrics, closed forms and simulation."""

import math

import numpy as np
import pytest
import torch

from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics, compute_rollout_correction_weights
from verl_precision.probe import mismatch
from verl_precision.probe.mismatch import Answer, Estimate


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
    _, by_token = compute_rollout_correction_weights(trainer - rollout, mask, "token", mismatch.THRESHOLD)
    ours = mismatch.measure(answers)
    assert ours["k3"].value == pytest.approx(theirs["k3_kl"], rel=1e-4)
    assert ours["k3_as_logged"] == pytest.approx(theirs["k3_kl"], rel=1e-4)
    assert 0 < ours["clipped_tokens"].value == pytest.approx(by_token["rollout_is_ratio_fraction_high"], rel=1e-5)
    difference = ((trainer.exp() - rollout.exp()).abs() * mask).sum() / mask.sum()  # verl's rollout_probs_diff_mean
    assert ours["equal"].value == 0 and mismatch.share_equal(ours["equal"]) == "0.00% (0.00%–0.00%)"
    assert ours["probs_diff"].value == pytest.approx(difference.item(), rel=1e-5)


def test_small_mismatch_keeps_its_digits():
    """In fp32, as verl logs it, exp(d) − d − 1 of d = 1e-6 is rounding."""
    result = mismatch.measure(answers_of([np.full(16, 1e-6)] * 16))
    assert result["k3"].value == pytest.approx(5e-13, rel=1e-3)
    assert abs(result["k3_as_logged"]) > 1e-9 or result["k3_as_logged"] == 0
    assert 0 <= result["rate"].value < 1e-15, "all weights are alike"


@pytest.mark.parametrize("scale", [1e-5, 3e-2])
def test_independent_terms_lose_their_variance(scale):
    result = mismatch.measure(independent(scale, 512, 64))
    assert result["block"] == 64 and result["longest"] == 64
    assert result["rate"].low < scale**2 < result["rate"].high
    assert result["rate"].value == pytest.approx(scale**2, rel=0.25)
    assert result["growth"].low < 1 < result["growth"].high
    points = {point["length"]: point for point in result["curve"]}
    assert [length for length, point in points.items() if point["measured"]] == [1, 2, 4, 8, 16, 32, 64]
    for length in mismatch.LENGTHS:
        point = points[length]
        assert not point["measured"] and point["ess"].low <= math.exp(-(scale**2) * length) <= point["ess"].high
    for length in (1, 8, 64):
        ess = points[length]["ess"]
        assert ess.low < math.exp(-(scale**2) * length) < ess.high, "of an answer's first tokens, not of all"


def test_extrapolation_matches_longer_answers():
    short, long = (mismatch.measure(independent(0.02, 512, length)) for length in (32, 1024))
    (predicted,), (measured,) = ([p for p in result["curve"] if p["length"] == 1024] for result in (short, long))
    assert not predicted["measured"] and measured["measured"] and measured["sequences"] == 512
    for point in (predicted, measured):
        assert point["ess"].low < math.exp(-(0.02**2) * 1024) < point["ess"].high
        assert point["clipped"].low < mismatch.clipped(0.02**2, 1024) < point["clipped"].high
    assert mismatch.clipped(0.0, 1024) == 0.0


def test_correlated_terms_raise_growth():
    rng = np.random.default_rng(1)
    result = mismatch.measure(answers_of([rng.normal(rng.normal(0, 1e-3), 1e-3, 64) for _ in range(512)]))
    assert result["growth"].low > 10, "variance of 64 + 64² terms over that of 2 × 64"
    assert result["growth"].value == pytest.approx(32.5, rel=0.25)


def test_every_length_counts_the_answers_that_are_long_enough():
    for number, measured in ((64, [1, 2, 4, 8, 16]), (63, [])):
        curve = mismatch.measure(independent(1e-3, number, 16))["curve"]
        assert [point["length"] for point in curve if point["measured"]] == measured
    rows = independent(1e-2, 80, 8) + independent(1e-2, 80, 600)
    points = {point["length"]: point for point in mismatch.measure(rows)["curve"]}
    assert points[8]["sequences"] == 160 and points[16]["sequences"] == points[512]["sequences"] == 80
    assert points[512]["measured"] and not points[1024]["measured"]


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


def regime(k3: tuple, ess: float = 0.9, prompts: int = 8) -> dict:
    point = {"length": 8192, "measured": False, "ess": Estimate(ess, ess - 0.01, ess + 0.01)}
    equal = Estimate(float(k3[0] == 0))
    counts = {"prompts": prompts, "tokens": 99, "longest": 9, "block": 16}
    return counts | {
        "k3": Estimate(*k3),
        "rate": Estimate(*(2 * each for each in k3)),
        "curve": [point],
        "equal": equal,
    }


def test_verdict():
    fp32, fp16, bf16 = regime((1e-13,)), regime((1e-7, 5e-8, 2e-7), 0.99), regime((1e-5, 8e-6, 2e-5), 0.5)
    verdict = mismatch.verdict({"fp32": fp32, "bf16": bf16, "fp16": fp16})
    assert verdict.startswith("fp16 mismatches least: its k3 of 1e-07 is 100 times below bf16's; ")
    assert "of 8192-token sequences cost 1.0 % (0–2.0) in fp16, 50 % (49–51) in bf16 of the samples (extrap" in verdict
    assert verdict.endswith("; untruncated, they hold in fp16 (T·k3 8.2e-04), hold in bf16 (T·k3 0.082)")
    lost = mismatch.verdict({"fp16": fp16, "bf16": regime((1e-2, 9e-3, 2e-2), 0.002)})
    assert "100 % (99–101) in bf16 of the samples" in lost, "not 1e+02 %"
    assert lost.endswith("hold in fp16 (T·k3 8.2e-04), do not hold in bf16 (T·k3 82)")
    unclear = mismatch.verdict({"bf16": bf16, "fp16": regime((1e-7, 5e-8, 9e-6))})
    assert unclear.startswith("the probe does not decide between fp16 and bf16: k3 1e-07 (5e-08–9e-06), 1e-05")
    few = mismatch.verdict({"bf16": regime((1e-5, 8e-6, 2e-5), prompts=7), "fp16": regime((1e-7,) * 3, prompts=7)})
    assert few.startswith("the probe does not decide from 7 prompts")
    overflow = mismatch.verdict({"bf16": bf16, "fp16": {"overflow": "the rollout's logits are not finite in fp16"}})
    assert overflow.startswith("bf16 has a k3 of 1e-05") and "fp16 overflows: the rollout's logits" in overflow
    assert mismatch.verdict({"fp32": fp32}) == "no 16-bit regime was measured"
    bitwise = mismatch.verdict({"bf16": regime((0.0, 0.0, 0.0)), "fp16": fp16})
    assert bitwise == "bitwise: trainer and rollout have the same log-probabilities of all 99 tokens in bf16"


def test_equal_log_probabilities_are_bitwise_and_neither_grow_nor_cost():
    rows = answers_of([np.zeros(16)] * 16)
    result = mismatch.measure(rows)
    assert mismatch.share_equal(result["equal"]) == "bitwise" and result["k3"].high == 0
    assert result["growth"] == Estimate(1, 1, 1) and {point["ess"].low for point in result["curve"]} == {1}
    rows[0].trainer[:4] -= 1e-6
    assert mismatch.measure(rows)["equal"].value == 252 / 256
