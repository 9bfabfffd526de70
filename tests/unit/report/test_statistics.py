"""The outcomes of a run, passing and collapse, and verdicts over seeds."""

import math

import pytest

from verl_precision.facts.metrics import CRITIC_SKIPPED, K3_KL, LOSS_SCALE, REWARD, SKIPPED
from verl_precision.format import duration, significant
from verl_precision.report.catalog import OUTCOMES, Steps, outcomes
from verl_precision.report.statistics import (
    Spread,
    Verdict,
    collapsed,
    moving_means,
    passed,
    spread_over,
    verdict,
    verdicts,
)


def steps(*rewards: float) -> Steps:
    return {step: {REWARD: reward} for step, reward in enumerate(rewards, 1)}


def test_a_run_passes_at_the_first_mean_of_five_finite_steps_above_the_threshold():
    assert moving_means(steps(0, 1, math.nan, 0, 1, 0, 1)) == {6: 0.4, 7: 0.6}
    assert moving_means(steps(1, 1, 1, 1)) == {}
    rewards = steps(*[0.0] * 5, *[1.0] * 10)
    assert (passed(rewards, 0.95), passed(rewards, 0.5)) == (10, 8)
    assert passed(steps(*[0.95] * 10), 0.95) is None, "exceeds"


@pytest.mark.parametrize(
    "rewards, at",
    [
        ([1.0] * 10 + [0.0] * 10, 13),  # means .8, .6, .4
        ([1.0] * 10 + [0.0] * 5 + [1.0] * 5 + [0.0] * 5, 23),  # came back and fell again
        ([1.0] * 10 + [0.5] * 10, None),  # half is not below half
        ([-1.0] * 5 + [-0.5] * 5 + [-2.0] * 10, None),  # no best above 0
        ([1.0] * 4 + [0.0] * 4, 8),  # the best mean is the first, .8
    ],
)
def test_run_collapses_if_it_stays_below_half_of_its_best(rewards, at):
    assert collapsed(steps(*rewards)) == at


def test_outcomes_of_a_run():
    data = {}
    for step in range(1, 8):
        data[step] = {REWARD: step / 10, K3_KL: 10.0**-step, LOSS_SCALE: 2.0**step, "perf/throughput": 100.0 * step}
        data[step] |= {SKIPPED: float(step == 2), CRITIC_SKIPPED: 2.0 * (step == 3)}
        data[step] |= {"actor/grad_norm": math.nan if step == 3 else 1.0, "actor/entropy": math.nan}
    expected = {
        **{"reward_first": 0.1, "reward_last": 0.5, "k3_mean": 0.1111111 / 7, "k3_median": 1e-4},
        **{"loss_scale_last": 128, "skipped_total": 1, "critic_skipped_total": 2, "throughput_median": 400},
        **{"grad_norm_mean": 1.0, "entropy_last": None, "memory_peak": None},
    }
    assert {name: value for name, value in outcomes(data).items() if name in expected} == pytest.approx(expected)


def test_runs_without_a_recorded_seed_count_as_different_seeds():
    pairs = [(1, 1.0), (1, 2.0), (None, 3.0), (None, 4.0)]
    assert spread_over(pairs) == Spread((1.0, 2.0, 3.0, 4.0), 4, 3)
    assert spread_over([*pairs[:3], (None, None)]) == Spread((1.0, 2.0, 3.0), 4, 2), "of those with a value"
    assert Spread((1.0, 2.0, 3.0), 3, 3).std == 1.0 and Spread((1.0,), 3, 1).std is None, "of the sample"


def verdict_on(name: str, first: tuple, second: tuple = (1e-5, 2e-5, 4e-5), seeds: int = 3) -> Verdict:
    of = next(each for each in OUTCOMES if each.name == name)
    spreads = [Spread(values, len(values), min(seeds, len(values))) for values in (first, second)]
    return verdict(of, ("a", spreads[0]), ("b", spreads[1]), 1)


def test_verdict_needs_three_seeds_and_an_interval_that_excludes_equality():
    high, low = (0.9, 0.91, 0.92), (0.5, 0.51, 0.52)
    clear = verdict_on("reward_last", high, low)
    # 4 degrees of freedom, t(.975) = 2.776: 0.4 ± 2.776 × 0.01 × sqrt(2 / 3)
    assert clear.separates and clear.text.startswith("a higher: +0.400 (+0.377 to +0.423)")
    assert verdict_on("reward_last", low, high).text.startswith("a lower: -0.400")
    assert verdict_on("reward_last", high[:2], low).text == "no verdict: a has 2 of at least 3 seeds"
    again = verdict_on("reward_last", high, low, seeds=1)
    assert again.text == "no verdict: a has 1, b has 1 of at least 3 seeds", "runs of one seed are not three"
    open_ = verdict_on("reward_last", (0.9, 0.5, 0.7), (0.8, 0.6, 0.65))
    assert not open_.separates and open_.text.startswith("no verdict: ") and open_.text.endswith("includes 0")
    assert verdict_on("skipped_total", (0, 0, 0), (0, 0, 0)).text == "no verdict: equal in every run"
    found = verdict_on("skipped_total", (1, 1, 1), (0, 0, 0))
    assert found.text.startswith("no verdict: no spread") and found.effect is None


def test_more_labels_need_a_clearer_difference():
    rewards = {"a": (1.0, 1.1, 1.2), "b": (1.3, 1.4, 1.5), "c": (1.0, 1.2, 1.4), "d": (1.1, 1.3, 1.5)}
    none = {of.name: Spread((), 3, 3) for of in OUTCOMES}
    for labels, pairs in (("ab", 1), ("abcd", 6)):
        spreads = {label: none | {"reward_last": Spread(rewards[label], 3, 3)} for label in labels}
        found = verdicts(spreads)
        assert len(found) == pairs and any(each.separates for each in found) == (pairs == 1)


def test_mismatch_is_compared_by_ratio_unless_it_is_rounding_noise():
    found = verdict_on("k3_mean", (1e-7, 2e-7, 4e-7))
    assert found.separates and found.effect == pytest.approx(0.01) and found.low < 0.01 < found.high < 1
    assert found.text.startswith("a lower: 100× (")
    text = verdict_on("probs_diff_mean", (0.0, 1e-12, 1e-12)).text
    assert text == "no verdict: 0 is not above 0, which has no ratio"
    for least in (-2.4e-12, 0.0, 9e-9):
        found = verdict_on("k3_mean", (least, 2e-8, 2.1e-8))
        assert found.text.endswith("is not above 1e-08, which is rounding noise") and found.effect is None
    assert verdict_on("k3_mean", (1.1e-8, 1.2e-8, 1.3e-8)).separates


def test_numbers_have_three_significant_digits_and_durations_whole_seconds():
    values = (0.0, 26.0, 0.95712, 1958.4, 1.666e-7, -2.4e-12, 0.00951, 68376.3, 2e9)
    texts = ["0", "26", "0.957", "1958", "1.67e-07", "-2.40e-12", "0.00951", "68376", "2.00e+09"]
    assert [significant(value) for value in values] == texts
    assert [duration(seconds) for seconds in (0.4, 59.4, 59.7, 3661)] == ["0:00", "0:59", "1:00", "61:01"]
