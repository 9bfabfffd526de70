"""Compute statistics of the mismatch between trainer and rollout log-probabilities of the same tokens.

d is the trainer's minus the rollout's, as in verl's ``rollout_corr_helper.py``, so that exp(d) is the importance weight
of a sampled token. Intervals are of 95 %, by bootstrap over prompts, since answers to one prompt are correlated.
"""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np

BOUND = 20.0  # verl's SAFETY_BOUND: log weights are clamped to it
LENGTHS = tuple(2**power for power in range(9, 16))  # 512 … 32768 tokens
LEAST = 64  # sequences or blocks for an estimate of a variance
# A bootstrap's intervals are too narrow with fewer prompts: with 2 they separate equal regimes in a quarter of cases.
LEAST_PROMPTS = 8
DRAWS = 2000
EXTRAPOLATION = 2  # convention: T·k3 of longer answers than the measured ones may be off by this factor, either way


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, ``(tokens,)`` each."""

    prompt: int  # its index
    trainer: np.ndarray  # log-probabilities, float64
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

    def __init__(self, prompts: list[int], seed: int = 0):
        """Draw prompts; ``prompts`` has the prompt of each answer."""
        _, self.of = np.unique(prompts, return_inverse=True)
        number = self.of.max() + 1
        self.draws = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), DRAWS)

    def __call__(self, statistic: Callable[..., np.ndarray], *columns: np.ndarray) -> Estimate:
        """Estimate ``statistic``, an elementwise function of the sums of the columns, ``(answers,)`` each."""
        sums = [np.bincount(self.of, column, self.draws.shape[1]) for column in columns]
        with np.errstate(all="ignore"):  # a draw may have none of the few answers that are long enough
            drawn = statistic(*(self.draws @ column for column in sums))
            value = statistic(*(column.sum() for column in sums))
        low, high = np.nanpercentile(drawn, [2.5, 97.5])
        return Estimate(float(value), float(low), float(high))


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


def measured_length(result: dict) -> int:
    """Return the largest number of tokens that at least ``LEAST`` of the answers have."""
    return max((point["length"] for point in result["curve"] if point["measured"]), default=result["block"])


def answer_k3(result: dict, length: int) -> Estimate:
    """Return the T·k3 of answers of ``length`` tokens, in nats, from the result of ``measure``.

    If the mismatches of an answer's tokens are correlated, the weights vary as independent ones of a larger k3 do. So
    this is the larger of T times k3 and λT/2, half the variance of the weights' logarithm.
    """
    k3, rate = result["k3"], result["rate"]
    value, low, high = (max(one, other / 2) for one, other in zip(astuple(k3), astuple(rate), strict=True))
    beyond = EXTRAPOLATION if length > measured_length(result) else 1
    return Estimate(value * length, low * length / beyond, high * length * beyond)


def ess_at_length(bootstrap: Bootstrap, answers: list[Answer], length: int, rate: Estimate) -> dict:
    """Return ESS/N of sequence weights over ``length`` tokens, measured if enough answers have them."""
    long = np.array([len(answer.rollout) >= length for answer in answers])
    if long.sum() >= LEAST:
        total = np.array([answer.log_ratio[:length].sum() for answer in answers])
        weight = weights(total) * long
        ess = bootstrap(lambda *sums: np.exp(-loss_rate(*sums, sums[-1])), weight, weight**2, long)
        return {"length": length, "measured": True, "sequences": int(long.sum()), "ess": ess}
    ess = Estimate(*(math.exp(-value * length) for value in (rate.value, rate.high, rate.low)))
    return {"length": length, "measured": False, "ess": ess}


def measure(answers: list[Answer]) -> dict:
    """Measure the mismatch of one trainer and one rollout.

    Returns:
        ``prompts``, ``sequences``, ``tokens``, ``longest``; as ``Estimate``, ``k3`` (nats), ``probs_diff`` (mean |Δp|)
        and ``equal`` (share of tokens with bitwise equal log-probabilities); ``largest`` |d|; ``rate``, λ per token,
        estimated from blocks of ``block`` tokens; ``growth``, the ratio of that λ to the λ of single tokens, 1 if their
        terms are independent; ``curve``, ``ess_at_length`` of each length.
    """
    bootstrap = Bootstrap([answer.prompt for answer in answers])
    sizes = np.array([len(answer.rollout) for answer in answers])
    mean = lambda column: bootstrap(lambda hits, count: hits / count, np.array(column), sizes)
    powers = [2**power for power in range(int(sizes.max()).bit_length())]
    enough = [length for length in powers if (sizes // length).sum() >= LEAST]
    block = max(enough, default=1)
    single, joint = blocks(answers, 1), blocks(answers, block)
    rate = bootstrap(loss_rate, *joint)

    def ratio(*sums: np.ndarray) -> np.ndarray:
        one, other = loss_rate(*sums[:4]), loss_rate(*sums[4:])
        return np.where(one == 0, 1, other / one)  # 0 where the log-probabilities are equal

    measured = [length for length in powers if (sizes >= length).sum() >= LEAST]
    return {
        "prompts": len(set(answer.prompt for answer in answers)),
        "sequences": len(answers),
        "tokens": int(sizes.sum()),
        "longest": int(sizes.max()),
        "k3": mean([k3(answer.log_ratio).sum() for answer in answers]),
        "probs_diff": mean([np.abs(np.exp(a.trainer) - np.exp(a.rollout)).sum() for a in answers]),
        "equal": mean([(a.trainer == a.rollout).sum() for a in answers]),
        "largest": float(max(np.abs(answer.log_ratio).max() for answer in answers)),
        "rate": rate,
        "block": block,
        "growth": bootstrap(ratio, *single, *joint),
        "curve": [ess_at_length(bootstrap, answers, length, rate) for length in sorted({*measured, *LENGTHS})],
    }
