"""Compute the statistics of a report: passing and collapse of a run, spread over seeds, verdicts on two labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev
from typing import NamedTuple

from verl_precision.facts.metrics import REWARD
from verl_precision.format import significant
from verl_precision.report.catalog import OUTCOMES, WINDOW, CatalogOutcome, Steps, finite

THRESHOLD = 0.95  # of the reward: the sanity test of arXiv 2510.26788 requires over 95 % training accuracy
LEAST_SEEDS = 3  # of each label, for a verdict
ERROR = 0.05  # error rate of all verdicts on one outcome together


def moving_means(steps: Steps) -> dict[int, float]:
    """Return by step the mean reward over the last ``WINDOW`` steps with a finite value."""
    rewards = finite(steps, REWARD)
    values = list(rewards.values())
    return {step: fmean(values[end - WINDOW : end]) for end, step in enumerate(rewards, 1) if end >= WINDOW}


def passed(steps: Steps, threshold: float) -> int | None:
    """Return the first step at which the moving mean of the reward exceeds ``threshold``, None if it never does."""
    return next((step for step, mean in moving_means(steps).items() if mean > threshold), None)


def collapsed(steps: Steps) -> int | None:
    """Return the step at which a run collapsed, None if it did not.

    It collapsed at step t if, at t and at every later step, the moving mean of its reward is below half of its best
    so far. A best that is not above 0 has no half below it, so there is no collapse.
    """
    best, since = -math.inf, None
    for step, mean in moving_means(steps).items():
        best = max(best, mean)
        low = best > 0 and mean < best / 2
        since = (since or step) if low else None
    return since


@dataclass(frozen=True)
class Spread:
    """One value over the runs of a label.

    Attributes:
        values: of the runs that have one.
        runs: the number of runs.
        seeds: different ones among those with a value; an unrecorded seed counts as another.
        std: of the sample (n − 1), None with a single run.
    """

    values: tuple[float, ...]
    runs: int
    seeds: int

    @property
    def mean(self) -> float | None:
        return fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        return stdev(self.values) if len(self.values) > 1 else None


def spread_over(values: Sequence[tuple[int | None, float | None]]) -> Spread:
    """Return the spread of the pairs of seed and value, one pair per run; the value is None if the run has none."""
    pairs = [(seed, value) for seed, value in values if value is not None]
    return Spread(tuple(value for _, value in pairs), len(values), count_seeds([seed for seed, _ in pairs]))


def count_seeds(seeds: Sequence[int | None]) -> int:
    """Return the number of different seeds; an unrecorded one, None, counts as another."""
    return len(set(seeds) - {None}) + seeds.count(None)


class Verdict(NamedTuple):
    """Verdict on whether the seeds separate two labels in one outcome.

    Attributes:
        text: the verdict, or ``no verdict: …``.
        separates: whether the interval excludes equality.
        effect: mean of ``first`` minus mean of ``second``; with scale "log" the ratio of their geometric means. None
            if it could not be computed.
        low: lower bound of the effect, ``high`` its upper bound.
    """

    outcome: str
    first: str
    second: str
    text: str
    separates: bool = False
    effect: float | None = None
    low: float | None = None
    high: float | None = None


def verdict(outcome: CatalogOutcome, first: tuple[str, Spread], second: tuple[str, Spread], pairs: int) -> Verdict:
    """Return whether two labels differ in an outcome: whether Welch's interval at 1 − ``ERROR``/``pairs`` excludes 0.

    Welch's t test: Biometrika 34, 1947. Dividing by the number of pairs (Bonferroni) bounds the error of all verdicts
    on one outcome together by ``ERROR``; different outcomes are not corrected for one another.

    Args:
        pairs: number of pairs of labels that are compared.
    """
    from scipy.stats import ttest_ind

    (a, one), (b, two) = first, second
    left, right, is_log = one.values, two.values, outcome.scale == "log"
    least = min(*left, *right)
    why = ""
    if few := [f"{label} has {spread.seeds}" for label, spread in (first, second) if spread.seeds < LEAST_SEEDS]:
        why = f"{', '.join(few)} of at least {LEAST_SEEDS} seeds"
    elif is_log and least <= outcome.noise:
        above = "0, which has no ratio" if not outcome.noise else f"{outcome.noise:g}, which is rounding noise"
        why = f"{significant(least)} is not above {above}"
    elif len(set(left)) == len(set(right)) == 1:
        why = "equal in every run" if left[0] == right[0] else "no spread over the seeds, so no interval"
    if why:
        return Verdict(outcome.name, a, b, f"no verdict: {why}")
    if is_log:
        left, right = [math.log(value) for value in left], [math.log(value) for value in right]
    interval = ttest_ind(left, right, equal_var=False).confidence_interval(1 - ERROR / pairs)
    effect, low, high = fmean(left) - fmean(right), float(interval.low), float(interval.high)
    separates, direction = low > 0 or high < 0, "higher" if effect > 0 else "lower"
    if is_log:  # a difference of logarithms is the logarithm of a ratio; the text has the one above 1
        above = (effect, low, high) if effect > 0 else (-effect, -high, -low)
        texts = [f"{significant(math.exp(value))}×" for value in above]
        effect, low, high = math.exp(effect), math.exp(low), math.exp(high)
    else:
        texts = [f"{'+' * (value > 0)}{significant(value)}" for value in (effect, low, high)]
    size = f"{texts[0]} ({texts[1]} to {texts[2]})"
    text = f"{a} {direction}: {size}" if separates else f"no verdict: {size} includes {'1×' if is_log else '0'}"
    return Verdict(outcome.name, a, b, text, separates, effect, low, high)


def verdicts(spreads: dict[str, dict[str, Spread]]) -> list[Verdict]:
    """Return the verdict on each outcome that is compared and each pair of labels that both have values of it.

    Args:
        spreads: by label and outcome.
    """
    pairs = list(combinations(spreads, 2))
    found = []
    for outcome in (each for each in OUTCOMES if each.scale):
        for a, b in pairs:
            first, second = (spreads[label][outcome.name] for label in (a, b))
            if first.values and second.values:
                found.append(verdict(outcome, (a, first), (b, second), len(pairs)))
    return found
