"""Compute statistics of the mismatch between trainer and rollout log-probabilities of the same tokens.

d is the trainer's minus the rollout's, as in verl's ``rollout_corr_helper.py``, so that exp(d) is the importance weight
of a sampled token. Intervals are of 95 %, by bootstrap over prompts, since answers to one prompt are correlated.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from verl_precision.format import significant
from verl_precision.sequence_weights import prediction
from verl_precision.spelling import spelled

THRESHOLD = 2.0  # of truncated importance weights, verl's default (algorithm.rollout_correction)
BOUND = 20.0  # verl's SAFETY_BOUND: log weights are clamped to it
LENGTHS = tuple(2**power for power in range(9, 16))  # 512 … 32768 tokens
LEAST = 64  # sequences or blocks for an estimate of a variance
# A bootstrap's intervals are too narrow with fewer prompts: with 2 they separate equal regimes in a quarter of cases.
LEAST_PROMPTS = 8
DRAWS = 2000
EXTRAPOLATION = 2  # convention: T·k3 of longer answers than the measured ones may be off by this factor, either way


@dataclass(frozen=True)
class Answer:
    """Log-probabilities of an answer's tokens, float64, ``(tokens,)``; ``prompt`` is an index.

    A mixture's also have the fingerprints (``routing``) of the experts, int64, where both sides' are observed.
    """

    prompt: int
    trainer: np.ndarray
    rollout: np.ndarray
    trainer_experts: np.ndarray | None = None
    rollout_experts: np.ndarray | None = None

    @property
    def log_ratio(self) -> np.ndarray:
        return self.trainer - self.rollout


@dataclass(frozen=True)
class Estimate:
    """A value and its interval; None if it cannot be estimated."""

    value: float | None
    low: float | None = None
    high: float | None = None


class Bootstrap:
    """Estimate functions of sums over answers, with intervals from the same draws of prompts with replacement."""

    def __init__(self, prompts: list[int], seed: int = 0):
        """``prompts``: the prompt of each answer."""
        _, self.of = np.unique(prompts, return_inverse=True)
        number = self.of.max() + 1
        self.draws = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), DRAWS)

    def __call__(self, statistic: Callable[..., np.ndarray], *columns: np.ndarray) -> Estimate:
        """Estimate ``statistic``, an elementwise function of the sums of the columns.

        Args:
            columns: a number per answer, ``(answers,)``.
        """
        sums = [np.bincount(self.of, column, self.draws.shape[1]) for column in columns]
        with np.errstate(all="ignore"):  # a draw may have none of the few answers that are long enough
            drawn = statistic(*(self.draws @ column for column in sums))
            value = statistic(*(column.sum() for column in sums))
        low, high = np.nanpercentile(drawn, [2.5, 97.5])
        return Estimate(float(value), float(low), float(high))


def k3(log_ratio: np.ndarray) -> np.ndarray:
    """Return exp(d) − d − 1, the k3 estimate of KL(rollout ‖ trainer) (http://joschu.net/blog/kl-approx.html)."""
    return np.expm1(log_ratio) - log_ratio


def k3_as_logged(answers: list[Answer]) -> float:
    """Return ``rollout_corr/k3_kl`` as verl computes it, in fp32: below about 1e-8 it is rounding."""
    log_ratio = np.concatenate([a.trainer.astype(np.float32) - a.rollout.astype(np.float32) for a in answers])
    return float(np.mean(np.exp(log_ratio) - log_ratio - np.float32(1)))


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


def answer_k3(k3: Estimate, rate: Estimate, length: int, measured: int) -> Estimate:
    """Return the T·k3 of answers of ``length`` tokens, in nats, measured on answers of at most ``measured`` tokens.

    If the mismatches of an answer's tokens are correlated, the weights vary as independent ones of a larger k3 do. So
    this is the larger of T times ``k3`` and λT/2, half the variance of the weights' logarithm; ``rate`` is λ.
    """
    each = [max(one, other / 2) for one, other in ((k3.value, rate.value), (k3.low, rate.low), (k3.high, rate.high))]
    beyond = EXTRAPOLATION if length > measured else 1
    return Estimate(each[0] * length, each[1] * length / beyond, each[2] * length * beyond)


def rate_growth(single: np.ndarray, joint: np.ndarray) -> np.ndarray:
    """Return the ratio of a λ from blocks to that of single tokens, 1 where the log-probabilities are equal."""
    return np.where(single == 0, 1, joint / single)


def clipped(rate: float, length: int) -> float:
    """Return the share of sequences with a weight above ``THRESHOLD``, for normal log-weights.

    Its variance is λT, and its mean −λT/2, since the mean weight under the rollout's own samples is 1.
    """
    if not rate:
        return 0.0
    spread = math.sqrt(rate * length)
    return math.erfc((math.log(THRESHOLD) / spread + spread / 2) / math.sqrt(2)) / 2


def at_length(bootstrap: Bootstrap, answers: list[Answer], length: int, rate: Estimate) -> dict:
    """Return ESS/N and the clipped share of sequence weights over ``length`` tokens, measured or extrapolated."""
    long = np.array([len(answer.rollout) >= length for answer in answers])
    if long.sum() >= LEAST:
        total = np.array([answer.log_ratio[:length].sum() for answer in answers])
        weight = weights(total) * long
        ess = bootstrap(lambda *sums: np.exp(-loss_rate(*sums, sums[-1])), weight, weight**2, long)
        above = bootstrap(lambda hits, count: hits / count, (total > math.log(THRESHOLD)) * long, long)
        return {"length": length, "measured": True, "sequences": int(long.sum()), "ess": ess, "clipped": above}
    ess = Estimate(*(math.exp(-value * length) for value in (rate.value, rate.high, rate.low)))
    above = Estimate(*(clipped(value, length) for value in (rate.value, rate.low, rate.high)))
    return {"length": length, "measured": False, "ess": ess, "clipped": above}


def measure(answers: list[Answer]) -> dict:
    """Measure the mismatch of one trainer and one rollout.

    Returns:
        ``prompts``, ``sequences``, ``tokens``, ``longest``; ``k3`` (nats), ``probs_diff`` (mean |Δp|), ``equal`` (share
        of tokens whose log-probabilities are equal to the bit) and ``clipped_tokens`` (share of tokens with a weight
        above ``THRESHOLD``) as ``Estimate``; ``k3_as_logged``; ``largest`` |d|; ``rate``, λ per token,
        estimated from blocks of ``block`` tokens; ``growth``, the ratio of that λ to the λ of single tokens, 1 if their
        terms are independent; ``curve``, a dict for each length. With fingerprints of experts also ``other_experts``,
        the share of tokens whose experts differ in any layer, as ``Estimate``.
    """
    bootstrap = Bootstrap([answer.prompt for answer in answers])
    sizes = np.array([len(answer.rollout) for answer in answers])
    mean = lambda column: bootstrap(lambda hits, count: hits / count, np.array(column), sizes)
    powers = [2**power for power in range(int(sizes.max()).bit_length())]
    enough = [length for length in powers if (sizes // length).sum() >= LEAST]
    block = max(enough, default=1)
    single, joint = blocks(answers, 1), blocks(answers, block)
    rate = bootstrap(loss_rate, *joint)
    growth = bootstrap(lambda *sums: rate_growth(loss_rate(*sums[:4]), loss_rate(*sums[4:])), *single, *joint)
    measured = [length for length in powers if (sizes >= length).sum() >= LEAST]
    result = {
        "prompts": len(set(answer.prompt for answer in answers)),
        "sequences": len(answers),
        "tokens": int(sizes.sum()),
        "longest": int(sizes.max()),
        "k3": mean([k3(answer.log_ratio).sum() for answer in answers]),
        "k3_as_logged": k3_as_logged(answers),
        "probs_diff": mean([np.abs(np.exp(a.trainer) - np.exp(a.rollout)).sum() for a in answers]),
        "equal": mean([(a.trainer == a.rollout).sum() for a in answers]),
        "clipped_tokens": mean([(answer.log_ratio > math.log(THRESHOLD)).sum() for answer in answers]),
        "largest": float(max(np.abs(answer.log_ratio).max() for answer in answers)),
        "rate": rate,
        "block": block,
        "growth": growth,
        "curve": [at_length(bootstrap, answers, length, rate) for length in sorted({*measured, *LENGTHS})],
    }
    if answers[0].trainer_experts is not None:
        result["other_experts"] = mean([(each.trainer_experts != each.rollout_experts).sum() for each in answers])
    return result


def verdict(regimes: dict[str, dict], shown: int = 8192) -> str:
    """Return the verdict on the 16-bit regimes as one sentence.

    Args:
        regimes: the result of ``measure`` for each, or ``{"overflow": text}``.
        shown: the response length that the sentence refers to.
    """
    overflowed = [name for name, result in regimes.items() if "overflow" in result]
    command = spelled("make preflight")
    tail = "".join(f"; {name} overflows: {regimes[name]['overflow']} ({command})" for name in overflowed)
    half = {name: result for name, result in regimes.items() if name != "fp32" and name not in overflowed}
    order = sorted(half, key=lambda name: half[name]["k3"].value)
    if not order:
        return "no 16-bit regime was measured" + tail
    bitwise = [name for name in order if half[name]["equal"].value == 1]
    if bitwise:
        tokens = " and ".join(f"{half[name]['tokens']} tokens in {name}" for name in bitwise)
        return f"bitwise: trainer and rollout have the same log-probabilities of all {tokens}{tail}"
    best, *others = order
    if not others:
        return f"{best} has a k3 of {half[best]['k3'].value:.2g}; no other 16-bit regime was measured{tail}"
    if (prompts := half[best]["prompts"]) < LEAST_PROMPTS:
        return f"the probe does not decide from {prompts} prompts: ask for ROWS={LEAST_PROMPTS} or more{tail}"
    close = [name for name in others if half[name]["k3"].low <= half[best]["k3"].high]
    if close:
        intervals = ", ".join(interval(half[name]["k3"], ".2g") for name in (best, *close))
        names = " and ".join((best, *close))
        return f"the probe does not decide between {names}: k3 {intervals}; ask for more ROWS{tail}"

    def cost(name: str) -> str:
        (point,) = [point for point in half[name]["curve"] if point["length"] == shown]
        loss, least, most = (significant(100 * float(value), 2) for (value,) in lost([point["ess"]]))
        return f"{loss} % ({least}–{most}) in {name}"

    def outcome(name: str) -> str:
        result = half[name]
        total = answer_k3(result["k3"], result["rate"], shown, measured_length(result))
        return f"{prediction(total.low, total.high)} in {name} (T·k3 {significant(total.value, 2)})"

    ratios = {name: half[name]["k3"].value / half[best]["k3"].value for name in others}
    worse = ", ".join(f"{float(f'{ratio:.2g}'):g} times below {name}'s" for name, ratio in ratios.items())
    (point,) = [point for point in half[best]["curve"] if point["length"] == shown]
    how = "measured" if point["measured"] else f"extrapolated from {half[best]['block']} tokens"
    least = f"{best} mismatches least: its k3 of {half[best]['k3'].value:.2g} is {worse}"
    costs, outcomes = (", ".join(map(describe, order)) for describe in (cost, outcome))
    weights = f"weights of {shown}-token sequences cost {costs} of the samples ({how}); untruncated, they {outcomes}"
    return f"{least}; {weights}{tail}"


def interval(estimate: Estimate, form: str) -> str:
    """Format as ``0.97 (0.95–0.98)``."""
    return f"{estimate.value:{form}} ({estimate.low:{form}}–{estimate.high:{form}})"


def share_equal(estimate: Estimate) -> str:
    """Format the share of tokens that are equal to the bit, ``bitwise`` if it is 1."""
    return "bitwise" if estimate.value == 1 else interval(estimate, ".2%")


def lost(estimates: list[Estimate]) -> np.ndarray:
    """Return 1 minus each estimate and its interval, ``(3, estimates)``."""
    return 1 - np.array([(each.value, each.high, each.low) for each in estimates]).reshape(-1, 3).T
