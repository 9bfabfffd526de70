"""What a run is judged by: its series, the outcomes taken from them, their spread over seeds, and what seeds support.

Everything here is about numbers that are in memory; ``lib.report.readers`` reads them, ``lib.report.build`` shows them.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median, stdev

from lib.run.metrics import (
    CRITIC_LOSS_SCALE,
    CRITIC_SKIPPED,
    FLOWRL,
    K3_KL,
    LOSS_SCALE,
    PROBS_DIFF,
    REWARD,
    SECONDS,
    SKIPPED,
)

WINDOW = 5  # steps of a moving mean
LEAST_SEEDS = 3  # of each side, for a verdict
ERROR = 0.05  # of all verdicts of one outcome together
K3_NOISE = 1e-8  # below it verl's estimate, which cannot be negative but comes out so, is the rounding of fp32


@dataclass(frozen=True)
class Series:
    """A metric over the steps.

    Attributes:
        metric: verl's name; ``formerly`` the names it had in older releases, ``oat`` OAT's.
        scale: how it is drawn: "linear", "log" (then the mean over seeds is the geometric one) or "log2".
        counted: whether its sum up to each step is drawn.
    """

    name: str
    title: str
    metric: str
    scale: str = "linear"
    formerly: tuple[str, ...] = ()
    counted: bool = False
    oat: str = ""


ACCURACY = "eval/average/accuracy"  # run_math_rl's name in OAT; verl has one a data source, VALIDATION
VALIDATION = re.compile(r"val-core/.+/(acc|reward)/mean@\d+")
GRAD_NORM = "actor/grad_norm"
LR = "actor/lr"

SERIES = (
    Series("reward", "reward of the training batch", REWARD, oat="actor/rewards"),
    Series("accuracy", "accuracy in evaluation", ACCURACY, oat="eval/accuracy"),
    Series(
        "k3",
        "mismatch: k3 estimate of KL(rollout ‖ trainer)",
        K3_KL,
        "log",
        ("mismatch/mismatch_k3_kl",),
        oat="train/rollout_k3_kl",
    ),
    Series(
        "probs_diff",
        "mismatch: mean difference of probabilities",
        PROBS_DIFF,
        "log",
        oat="train/rollout_probs_diff_mean",
    ),
    Series("loss_scale", "loss scale of the actor, × a skipped step", LOSS_SCALE, "log2", oat="train/loss_scale"),
    Series(
        "critic_loss_scale",
        "loss scale of the critic",
        CRITIC_LOSS_SCALE,
        "log2",
        oat="train/critic_loss_scale",
    ),
    Series(
        "skipped",
        "skipped optimizer steps of the actor, in all",
        SKIPPED,
        counted=True,
        oat="train/skipped_steps",
    ),
    Series(
        "critic_skipped",
        "skipped optimizer steps of the critic, in all",
        CRITIC_SKIPPED,
        counted=True,
        oat="train/critic_skipped_steps",
    ),
    Series("grad_norm", "gradient norm of the actor", GRAD_NORM, oat="train/policy_grad_norm"),
    Series("entropy", "entropy of the policy", "actor/entropy", oat="train/entropy"),
    Series("response_length", "response length, tokens", "response_length/mean", oat="actor/response_tok_len"),
    Series("lr", "learning rate of the actor", LR, oat="misc/lr"),
    Series("throughput", "throughput, tokens/s per worker", "perf/throughput"),
    Series("seconds", "time of a step, s", SECONDS),
    Series(
        "memory",
        "memory of the trainer at its peak, GiB",
        "actor/perf/max_memory_allocated_gb",
        formerly=("perf/max_memory_allocated_gb",),
    ),
    *(Series(f"flowrl_{name}", f"FlowRL: {name.replace('_', ' ')}", metric) for name, metric in FLOWRL.items()),
)
METRIC = {name: of.metric for of in SERIES for name in (of.metric, *of.formerly, of.oat) if name}  # by any name
UNTRAINED = {ACCURACY, LR}  # what an evaluation before the first step logs, too

Steps = dict[int, dict[str, float]]  # by step the metrics of ``METRIC``; NaN is what was logged and is not finite


def known(name: str) -> str | None:
    """The report's name of a metric, whoever logged it under whichever name; None for one that is not reported."""
    return METRIC.get(name) or (ACCURACY if VALIDATION.fullmatch(name) else None)


def finite(steps: Steps, metric: str) -> list[float]:
    """The values of a metric in the order of the steps, without those that are absent or not finite."""
    found = (steps[step].get(metric, math.nan) for step in sorted(steps))
    return [value for value in found if math.isfinite(value)]


def moving_means(steps: Steps, metric: str = REWARD) -> dict[int, float]:
    """By step the mean over the last ``WINDOW`` steps that have a finite value, from the first with so many on."""
    having = [step for step in sorted(steps) if math.isfinite(steps[step].get(metric, math.nan))]
    return {
        having[end]: fmean(steps[step][metric] for step in having[end - WINDOW + 1 : end + 1])
        for end in range(WINDOW - 1, len(having))
    }


def passed(steps: Steps, threshold: float) -> int | None:
    """The first step at which the moving mean of the reward exceeds ``threshold``; None: at none."""
    return next((step for step, mean in moving_means(steps).items() if mean > threshold), None)


def collapsed(steps: Steps) -> int | None:
    """The step at which a run collapsed, None where it did not.

    It collapsed at step t if the moving mean of its reward is below half of the best that it had reached before t, at t
    and at every later step. A best that is not above 0 has no half below it: no collapse is found there.
    """
    best, since = -math.inf, None
    for step, mean in moving_means(steps).items():
        best = max(best, mean)
        low = best > 0 and mean < best / 2
        since = (since or step) if low else None
    return since


@dataclass(frozen=True)
class Outcome:
    """One number of a run.

    Attributes:
        of: takes the steps that all runs share.
        scale: "linear": two labels are compared by their difference; "log": by their ratio; "": not at all.
        form: how it is written, where not by three digits.
        speed: whether a verdict on it is a claim of speed, which holds only for the dtypes that were named.
        noise: what is not above it is noise and not compared.
    """

    name: str
    title: str
    metric: str
    of: Callable[[list[float]], float]
    scale: str = "linear"
    form: str = ""
    speed: bool = False
    noise: float = 0.0


def written(value: float, digits: int = 3) -> str:
    """A number by its first digits, whole ones whole: ``0.00951``, ``26``, ``1958``, ``1.67e-07``."""
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    leading = math.floor(math.log10(abs(value)))
    if not -3 <= leading < 7:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(digits - 1 - leading, 0)}f}"


def last(found: list[float]) -> float:
    return fmean(found[-WINDOW:])


OUTCOMES = (
    Outcome("reward_first", "reward, first step", REWARD, lambda found: found[0], "", ".3f"),
    Outcome("reward_last", f"reward, last {WINDOW} steps", REWARD, last, "linear", ".3f"),
    Outcome("accuracy_last", "accuracy in evaluation, last", ACCURACY, lambda found: found[-1], "linear", ".3f"),
    Outcome("k3_mean", "k3, mean", K3_KL, fmean, "log", noise=K3_NOISE),
    Outcome("k3_median", "k3, median step", K3_KL, median, "log", noise=K3_NOISE),
    Outcome("probs_diff_mean", "probability difference, mean", PROBS_DIFF, fmean, "log"),
    Outcome("loss_scale_last", "loss scale at the end", LOSS_SCALE, lambda found: found[-1], ""),
    Outcome("skipped_total", "skipped steps", SKIPPED, sum),
    Outcome("critic_skipped_total", "skipped steps, critic", CRITIC_SKIPPED, sum),
    Outcome("grad_norm_mean", "gradient norm, mean", GRAD_NORM, fmean),
    Outcome("entropy_last", f"entropy, last {WINDOW} steps", "actor/entropy", last),
    Outcome("response_length_last", f"response length, last {WINDOW}", "response_length/mean", last),
    Outcome("throughput_median", "throughput, tokens/s, median", "perf/throughput", median, "log", speed=True),
    Outcome("seconds_median", "step, s, median", SECONDS, median, "log", speed=True),
    Outcome("memory_peak", "trainer's memory, GiB, peak", "actor/perf/max_memory_allocated_gb", max),
    *(Outcome(f"flowrl_{n}_last", f"{n.replace('_', ' ')}, last {WINDOW}", m, last) for n, m in FLOWRL.items()),
)


def outcomes(steps: Steps) -> dict[str, float | None]:
    """By name each outcome; None where its metric has no finite value."""
    found = {of.name: finite(steps, of.metric) for of in OUTCOMES}
    return {of.name: of.of(found[of.name]) if found[of.name] else None for of in OUTCOMES}


@dataclass(frozen=True)
class Spread:
    """An outcome over the seeds of a label; ``std`` is the sample's (n − 1), None of one run alone.

    Attributes:
        values: of the runs that have one; ``of`` is how many runs there are.
        seeds: different ones among those with a value; a run whose seed is not recorded counts as another.
    """

    values: tuple[float, ...]
    of: int
    seeds: int

    @property
    def mean(self) -> float | None:
        return fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        return stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Verdict:
    """What the seeds say on one outcome of two labels.

    Attributes:
        effect: mean of ``first`` minus mean of ``second``; with scale "log" the ratio of their geometric means.
            ``low`` and ``high`` bound it. None where it could not be computed.
        holds: whether there is a verdict.
        text: the verdict, or ``no verdict: …`` or ``not claimed: …``.
    """

    outcome: str
    first: str
    second: str
    text: str
    holds: bool = False
    effect: float | None = None
    low: float | None = None
    high: float | None = None


def welch(first: Sequence[float], second: Sequence[float], error: float) -> tuple[float, float, float]:
    """The difference of two means and its interval at 1 − ``error``, by Welch's t test (Biometrika 34, 1947)."""
    from scipy.stats import ttest_ind

    interval = ttest_ind(first, second, equal_var=False).confidence_interval(1 - error)
    return fmean(first) - fmean(second), float(interval.low), float(interval.high)


def verdict(of: Outcome, first: tuple[str, Spread], second: tuple[str, Spread], pairs: int, unclaimed: str) -> Verdict:
    """Whether ``first`` and ``second`` differ in an outcome: Welch's interval at 1 − ``ERROR``/``pairs`` excludes none.

    Dividing by the number of pairs (Bonferroni) keeps all verdicts on one outcome together at ``ERROR``; different
    outcomes are not corrected for one another.

    Args:
        pairs: of labels that are compared.
        unclaimed: why no speed may be claimed, "" where it may.
    """
    (a, one), (b, two) = first, second
    if of.speed and unclaimed:
        return Verdict(of.name, a, b, f"not claimed: {unclaimed}")
    few = [f"{label} has {spread.seeds}" for label, spread in (first, second) if spread.seeds < LEAST_SEEDS]
    if few:
        return Verdict(of.name, a, b, f"no verdict: {', '.join(few)} of at least {LEAST_SEEDS} seeds")
    left, right = one.values, two.values
    if of.scale == "log":
        if (least := min(*left, *right)) <= of.noise:
            above = "0, which has no ratio" if not of.noise else f"{of.noise:g}, which is rounding noise"
            return Verdict(of.name, a, b, f"no verdict: {written(least)} is not above {above}")
        left, right = [math.log(value) for value in left], [math.log(value) for value in right]
    if len(set(left)) == len(set(right)) == 1:
        same = "equal in every run" if left[0] == right[0] else "no spread over the seeds, so no interval"
        return Verdict(of.name, a, b, f"no verdict: {same}")
    bounds = welch(left, right, ERROR / pairs)
    excluded = bounds[1] > 0 or bounds[2] < 0
    if of.scale == "log":
        bounds = tuple(map(math.exp, bounds))
        factor, span = max(bounds[0], 1 / bounds[0]), sorted((bounds[1], bounds[2]))
        span = span if bounds[0] > 1 else sorted(1 / bound for bound in span)
        size = f"{written(factor)}× ({written(span[0])}× to {written(span[1])}×)"
    else:
        effect, low, high = (f"{'+' * (bound > 0)}{written(bound)}" for bound in bounds)
        size = f"{effect} ({low} to {high})"
    none = 1.0 if of.scale == "log" else 0.0
    if excluded:
        text = f"{a} {'higher' if bounds[0] > none else 'lower'}: {size}"
    else:
        text = f"no verdict: {size} includes {none:g}{'×' if none else ''}"
    return Verdict(of.name, a, b, text, excluded, *bounds)


def verdicts(spreads: dict[str, dict[str, Spread]], unclaimed: dict[str, str]) -> list[Verdict]:
    """Each outcome of each pair of labels that both have.

    Args:
        spreads: by label and outcome.
        unclaimed: by label why no speed may be claimed, "" where it may.
    """
    pairs = list(combinations(spreads, 2))
    return [
        verdict(of, (a, spreads[a][of.name]), (b, spreads[b][of.name]), len(pairs), unclaimed[a] or unclaimed[b])
        for of in OUTCOMES
        if of.scale
        for a, b in pairs
        if spreads[a][of.name].values and spreads[b][of.name].values
    ]
