"""Compute statistics of the mismatch between trainer and rollout log-probabilities of the same tokens.

d is the trainer's minus the rollout's, as in verl's ``rollout_corr_helper.py``, so that exp(d) is the importance weight
of a sampled token. Intervals are of 95 %, by bootstrap over prompts, since answers to one prompt are correlated.
"""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np

BOUND = 20.0  # verl's SAFETY_BOUND: log weights are clamped to it
LEAST = 64  # blocks for an estimate of a variance
# A bootstrap's intervals are too narrow with fewer prompts: with 2 they separate equal regimes in a quarter of cases.
LEAST_PROMPTS = 8
DRAWS = 2000
EXTRAPOLATION = 2  # convention: T·k3 of more tokens than a block's may be off by this factor, either way


class Answer(NamedTuple):
    """The log-probabilities of an answer's tokens, float64, ``(tokens,)`` each."""

    prompt: int  # its index
    trainer: np.ndarray
    rollout: np.ndarray

    @property
    def log_ratio(self) -> np.ndarray:
        return self.trainer - self.rollout


@dataclass(frozen=True)
class Estimate:
    """A value and its interval."""

    value: float
    low: float
    high: float

    def text(self, form: str) -> str:
        """Format as ``0.97 (0.95–0.98)``."""
        return f"{self.value:{form}} ({self.low:{form}}–{self.high:{form}})"


class Bootstrap:
    """Estimate functions of sums over answers, with intervals from the same draws of prompts with replacement."""

    def __init__(self, prompts: list[int]):
        _, self.of = np.unique(prompts, return_inverse=True)
        number = self.of.max() + 1
        self.draws = np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), DRAWS)

    def __call__(self, statistic: Callable[..., np.ndarray], *columns: np.ndarray) -> Estimate:
        """Estimate ``statistic``, an elementwise function of the sums of the columns, ``(answers,)`` each."""
        sums = [np.bincount(self.of, column, self.draws.shape[1]) for column in columns]
        drawn = statistic(*(self.draws @ column for column in sums))
        value = statistic(*(column.sum() for column in sums))
        return Estimate(float(value), *map(float, np.percentile(drawn, [2.5, 97.5])))


def k3(log_ratio: np.ndarray) -> np.ndarray:
    """Return exp(d) − d − 1, the k3 estimate of KL(rollout ‖ trainer) (http://joschu.net/blog/kl-approx.html)."""
    return np.expm1(log_ratio) - log_ratio


def weights(log_ratios: np.ndarray) -> np.ndarray:
    """Return exp − 1 of the summed log-ratios, so that weights near 1 keep their digits."""
    return np.expm1(np.clip(log_ratios, -BOUND, BOUND))


def loss_rate(first: np.ndarray, second: np.ndarray, count: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return λ of ESS/N = exp(−λT), from the first and second moments of ``count`` weights minus 1 over ``tokens``.

    ESS = (Σw)²/Σw² (Kish), so ESS/N = 1/(1 + var w/mean² w).
    """
    mean, square = first / count, second / count
    return np.log1p(np.maximum(square - mean**2, 0) / (1 + mean) ** 2) / (tokens / count)


def blocks(answers: list[Answer], length: int) -> tuple[np.ndarray, ...]:
    """Return the arguments of ``loss_rate`` from each answer's blocks of ``length`` tokens; the last may be shorter."""
    parts = [weights(np.add.reduceat(a.log_ratio, range(0, len(a.rollout), length))) for a in answers]
    sums = [part.sum() for part in parts], [(part**2).sum() for part in parts], [part.size for part in parts]
    return *map(np.array, sums), np.array([len(answer.rollout) for answer in answers])


def answer_k3(result: dict, length: int) -> Estimate:
    """Return the T·k3 of answers of ``length`` tokens, in nats, from the result of ``measure``.

    If the mismatches of an answer's tokens are correlated, the weights vary as independent ones of a larger k3 do. So
    this is the larger of T times k3 and λT/2, half the variance of the weights' logarithm.
    """
    value, low, high = (
        max(one, other / 2) for one, other in zip(astuple(result["k3"]), astuple(result["rate"]), strict=True)
    )
    beyond = EXTRAPOLATION if length > result["block"] else 1
    return Estimate(value * length, low * length / beyond, high * length * beyond)


def effective_share(rate: Estimate, length: int) -> Estimate:
    """Return ESS/N of sequence weights over ``length`` tokens, as if blocks of tokens were independent."""
    return Estimate(*(math.exp(-each * length) for each in (rate.value, rate.high, rate.low)))


def measure(answers: list[Answer]) -> dict:
    """Measure the mismatch of one trainer and one rollout.

    Returns:
        ``prompts``, ``sequences``, ``tokens``, ``longest``; as ``Estimate``, ``k3`` (nats), ``probs_diff`` (mean |Δp|)
        and ``equal`` (share of tokens with bitwise equal log-probabilities); ``largest`` |d|; ``rate``, λ per token,
        estimated from blocks of ``block`` tokens; ``growth``, the ratio of that λ to the λ of single tokens, 1 if their
        terms are independent.
    """
    bootstrap = Bootstrap([answer.prompt for answer in answers])
    sizes = np.array([len(answer.rollout) for answer in answers])
    mean = lambda column: bootstrap(lambda hits, count: hits / count, np.array(column), sizes)
    powers = [2**power for power in range(int(sizes.max()).bit_length())]
    block = max((length for length in powers if (sizes // length).sum() >= LEAST), default=1)
    single, joint = blocks(answers, 1), blocks(answers, block)

    def ratio(*sums: np.ndarray) -> np.ndarray:
        one, other = loss_rate(*sums[:4]), loss_rate(*sums[4:])
        with np.errstate(invalid="ignore"):  # one is 0 where the log-probabilities are equal
            return np.where(one == 0, 1, other / one)

    return {
        "prompts": len(set(answer.prompt for answer in answers)),
        "sequences": len(answers),
        "tokens": int(sizes.sum()),
        "longest": int(sizes.max()),
        "k3": mean([k3(answer.log_ratio).sum() for answer in answers]),
        "probs_diff": mean([np.abs(np.exp(a.trainer) - np.exp(a.rollout)).sum() for a in answers]),
        "equal": mean([(a.trainer == a.rollout).sum() for a in answers]),
        "largest": float(max(np.abs(answer.log_ratio).max() for answer in answers)),
        "rate": bootstrap(loss_rate, *joint),
        "block": block,
        "growth": bootstrap(ratio, *single, *joint),
    }
