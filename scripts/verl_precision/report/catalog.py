"""Define what a report shows of a run: series over the steps, and outcomes computed from them."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean, median

from verl_precision.facts.metrics import (
    CRITIC_LOSS_SCALE,
    CRITIC_SKIPPED,
    EQUAL_SHARE,
    FLOWRL,
    K3_KL,
    LOSS_SCALE,
    PROBS_DIFF,
    REWARD,
    SECONDS,
    SKIPPED,
)

WINDOW = 5  # steps of a moving mean
K3_NOISE = 1e-8  # smaller values of verl's estimate, some of them negative, are the rounding of fp32


@dataclass(frozen=True)
class Series:
    """A metric over the steps.

    Attributes:
        metric: verl's name.
        scale: of the figure: "linear", "log" (then the mean over seeds is the geometric one) or "log2".
        counted: whether the figure shows the sum up to each step.
    """

    name: str
    title: str
    metric: str
    scale: str = "linear"
    counted: bool = False


ACCURACY = "eval/average/accuracy"  # run_math_rl's name in OAT; verl has one per data source, VALIDATION
VALIDATION = re.compile(r"val-core/.+/(acc|reward)/mean@\d+")
GRAD_NORM = "actor/grad_norm"
ENTROPY = "actor/entropy"
LR = "actor/lr"
RESPONSE_LENGTH = "response_length/mean"  # tokens
THROUGHPUT = "perf/throughput"
MEMORY = "actor/perf/max_memory_allocated_gb"

SERIES = (
    Series("reward", "reward of the training batch", REWARD),
    Series("accuracy", "accuracy in evaluation", ACCURACY),
    Series("k3", "k3 estimate of KL(rollout ‖ trainer), nats/token", K3_KL, "log"),
    Series("probs_diff", "mean difference of the two probabilities", PROBS_DIFF, "log"),
    Series("equal_share", "share of tokens with equal log-probabilities", EQUAL_SHARE),
    Series("ess", "effective sample size of the weights, share", "rollout_corr/rollout_is_eff_sample_size"),
    Series("loss_scale", "loss scale of the actor, × a skipped step", LOSS_SCALE, "log2"),
    Series("critic_loss_scale", "loss scale of the critic", CRITIC_LOSS_SCALE, "log2"),
    Series("skipped", "skipped optimizer steps of the actor, in all", SKIPPED, counted=True),
    Series("critic_skipped", "skipped optimizer steps of the critic, in all", CRITIC_SKIPPED, counted=True),
    Series("grad_norm", "gradient norm of the actor", GRAD_NORM),
    Series("entropy", "entropy of the policy", ENTROPY),
    Series("response_length", "response length, tokens", RESPONSE_LENGTH),
    Series("lr", "learning rate of the actor", LR),
    Series("throughput", "throughput, tokens/s per worker", THROUGHPUT),
    Series("seconds", "time of a step, s", SECONDS),
    Series("memory", "memory of the trainer at its peak, GiB", MEMORY),
    *(Series(f"flowrl_{name}", f"FlowRL: {name.replace('_', ' ')}", metric) for name, metric in FLOWRL.items()),
)
METRIC = {series.metric: series.metric for series in SERIES} | {  # verl's name, by any name of the metric
    "mismatch/mismatch_k3_kl": K3_KL,  # older releases of verl
    "perf/max_memory_allocated_gb": MEMORY,
    "actor/rewards": REWARD,  # OAT
    "eval/accuracy": ACCURACY,
    "train/rollout_k3_kl": K3_KL,
    "train/rollout_probs_diff_mean": PROBS_DIFF,
    "train/loss_scale": LOSS_SCALE,
    "train/critic_loss_scale": CRITIC_LOSS_SCALE,
    "train/skipped_steps": SKIPPED,
    "train/critic_skipped_steps": CRITIC_SKIPPED,
    "train/policy_grad_norm": GRAD_NORM,
    "train/entropy": ENTROPY,
    "actor/response_tok_len": RESPONSE_LENGTH,
    "misc/lr": LR,
}
UNTRAINED = {ACCURACY, LR}  # logged by an evaluation before the first step, too

Steps = dict[int, dict[str, float]]  # by step the metrics of ``METRIC``; NaN where the logged value was not finite


def report_name(name: str) -> str | None:
    """Return the report's name of a metric, by any of its names; None for a metric that a report does not use."""
    return METRIC.get(name) or (ACCURACY if VALIDATION.fullmatch(name) else None)


def finite(steps: Steps, metric: str) -> dict[int, float]:
    """Return the values of a metric in the order of the steps, without those that are absent or not finite."""
    values = {step: steps[step].get(metric, math.nan) for step in sorted(steps)}
    return {step: value for step, value in values.items() if math.isfinite(value)}


@dataclass(frozen=True)
class CatalogOutcome:
    """One number of a run.

    Attributes:
        reduce: computes it from the metric's finite values at the steps that all runs share.
        scale: "linear" compares two labels by their difference, "log" by their ratio, "" not at all.
        form: format specification, by default three significant digits.
        noise: values up to it are noise and not compared.
    """

    name: str
    title: str
    metric: str
    reduce: Callable[[list[float]], float]
    scale: str = "linear"
    form: str = ""
    noise: float = 0.0


def last_mean(values: list[float]) -> float:
    return fmean(values[-WINDOW:])


OUTCOMES = (
    CatalogOutcome("reward_first", "reward, first step", REWARD, itemgetter(0), "", ".3f"),
    CatalogOutcome("reward_last", f"reward, last {WINDOW} steps", REWARD, last_mean, "linear", ".3f"),
    CatalogOutcome("accuracy_last", "accuracy in evaluation, last", ACCURACY, itemgetter(-1), "linear", ".3f"),
    CatalogOutcome("k3_mean", "k3, mean", K3_KL, fmean, "log", noise=K3_NOISE),
    CatalogOutcome("k3_median", "k3, median step", K3_KL, median, "log", noise=K3_NOISE),
    CatalogOutcome("probs_diff_mean", "probability difference, mean", PROBS_DIFF, fmean, "log"),
    CatalogOutcome("equal_share_mean", "equal log-probabilities, mean", EQUAL_SHARE, fmean, form=".4f"),
    CatalogOutcome("loss_scale_last", "loss scale at the end", LOSS_SCALE, itemgetter(-1), ""),
    CatalogOutcome("skipped_total", "skipped steps", SKIPPED, sum),
    CatalogOutcome("critic_skipped_total", "skipped steps, critic", CRITIC_SKIPPED, sum),
    CatalogOutcome("grad_norm_mean", "gradient norm, mean", GRAD_NORM, fmean),
    CatalogOutcome("entropy_last", f"entropy, last {WINDOW} steps", ENTROPY, last_mean),
    CatalogOutcome("response_length_last", f"response length, last {WINDOW}", RESPONSE_LENGTH, last_mean),
    # Speed is not compared: it depends on what else the machine did. `make bench` and `make verify-gpu` measure it.
    CatalogOutcome("throughput_median", "throughput, tokens/s, median", THROUGHPUT, median, ""),
    CatalogOutcome("seconds_median", "step, s, median", SECONDS, median, ""),
    CatalogOutcome("memory_peak", "trainer's memory, GiB, peak", MEMORY, max),
    *(
        CatalogOutcome(f"flowrl_{name}_last", f"{name.replace('_', ' ')}, last {WINDOW}", metric, last_mean)
        for name, metric in FLOWRL.items()
    ),
)


def outcomes(steps: Steps) -> dict[str, float | None]:
    """Return each outcome by name; None where its metric has no finite value."""
    values = {outcome.name: list(finite(steps, outcome.metric).values()) for outcome in OUTCOMES}
    return {each.name: each.reduce(values[each.name]) if values[each.name] else None for each in OUTCOMES}
