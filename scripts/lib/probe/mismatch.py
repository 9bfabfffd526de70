"""What a difference between two sides' log-probabilities of the same tokens comes to.

d is trainer's minus rollout's, as in verl's ``rollout_corr_helper.py``, so that exp(d) is the importance weight of a
token that the rollout sampled. Intervals are of 95 %, by bootstrap over prompts: answers to one prompt share it.
"""

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

THRESHOLD = 2.0  # of truncated importance weights, verl's default (algorithm.rollout_correction)
BOUND = 20.0  # verl's SAFETY_BOUND: log weights are clamped to it
LENGTHS = tuple(2**power for power in range(9, 16))  # 512 … 32768 tokens
LEAST = 64  # sequences or blocks from which a variance is taken
LEAST_PROMPTS = (
    8  # of fewer a bootstrap's intervals are too narrow: of 2 they part equal regimes in a quarter of all cases
)
DRAWS = 2000


@dataclass(frozen=True)
class Answer:
    """Log-probabilities of an answer's tokens at temperature 1, float64, ``(tokens,)`` each."""

    prompt: int
    trainer: np.ndarray
    rollout: np.ndarray

    @property
    def log_ratio(self) -> np.ndarray:
        return self.trainer - self.rollout


@dataclass(frozen=True)
class Estimate:
    """A number and its interval; ``None`` where there is nothing to take it from."""

    value: float | None
    low: float | None = None
    high: float | None = None


class Bootstrap:
    """Ratios of sums over answers, and the same of prompts drawn with replacement; the same draws for all."""

    def __init__(self, prompts: list[int], seed: int = 0):
        """``prompts``: of each answer the number of its prompt."""
        _, self.of = np.unique(prompts, return_inverse=True)
        number = self.of.max() + 1
        self.draws = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), DRAWS)

    def __call__(self, statistic: Callable[..., np.ndarray], *columns: np.ndarray) -> Estimate:
        """``statistic`` of the columns' sums, elementwise.

        Args:
            columns: a number for each answer, ``(answers,)``.
        """
        sums = [np.bincount(self.of, column, self.draws.shape[1]) for column in columns]
        with np.errstate(all="ignore"):  # a draw may hold none of the few answers that are long enough
            drawn = statistic(*(self.draws @ column for column in sums))
        low, high = np.nanpercentile(drawn, [2.5, 97.5])
        return Estimate(float(statistic(*(column.sum() for column in sums))), float(low), float(high))


def k3(log_ratio: np.ndarray) -> np.ndarray:
    """exp(d) − d − 1, the k3 estimate of KL(rollout ‖ trainer) (http://joschu.net/blog/kl-approx.html)."""
    return np.expm1(log_ratio) - log_ratio


def k3_as_logged(answers: list[Answer]) -> float:
    """``rollout_corr/k3_kl`` as verl computes it, in fp32: below 1e-8 or so it is rounding."""
    log_ratio = np.concatenate([a.trainer.astype(np.float32) - a.rollout.astype(np.float32) for a in answers])
    return float(np.mean(np.exp(log_ratio) - log_ratio - np.float32(1)))


def weights(log_ratios: np.ndarray) -> np.ndarray:
    """exp − 1 of the summed log-ratios: differences between weights near 1 keep their digits."""
    return np.expm1(np.clip(log_ratios, -BOUND, BOUND))


def loss_rate(first: np.ndarray, second: np.ndarray, count: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """λ of ESS/N = exp(−λT), from the moments of ``count`` weights minus 1 over so many ``tokens`` in all.

    ESS = (Σw)²/Σw² (Kish), so ESS/N = 1/(1 + var w/mean² w).
    """
    mean, square = first / count, second / count
    return np.log1p(np.maximum(square - mean**2, 0) / (1 + mean) ** 2) / (tokens / count)


def blocks(answers: list[Answer], length: int) -> tuple[np.ndarray, ...]:
    """What ``loss_rate`` takes, of each answer's consecutive blocks of ``length`` tokens; the last may be shorter."""
    parts = [weights(np.add.reduceat(a.log_ratio, range(0, len(a.rollout), length))) for a in answers]
    sums = [part.sum() for part in parts], [(part**2).sum() for part in parts], [part.size for part in parts]
    return *map(np.array, sums), np.array([len(answer.rollout) for answer in answers])


def clipped(rate: float, length: int) -> float:
    """The share of sequences whose weight is above ``THRESHOLD``, where the log-weight is normal.

    Its variance is λT, and its mean −λT/2, since the mean weight under the rollout's own samples is 1.
    """
    if not rate:
        return 0.0
    spread = math.sqrt(rate * length)
    return math.erfc((math.log(THRESHOLD) / spread + spread / 2) / math.sqrt(2)) / 2


def at_length(bootstrap: Bootstrap, answers: list[Answer], length: int, rate: Estimate) -> dict:
    """ESS/N and the share clipped of sequence weights over the first ``length`` tokens: measured or extrapolated."""
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
    """All that is said of one pair of sides.

    Returns:
        ``prompts``, ``sequences``, ``tokens``, ``longest``; ``k3`` (nats), ``probs_diff`` (mean |Δp|) and
        ``clipped_tokens`` (share of tokens with a weight above ``THRESHOLD``) as ``Estimate``; ``k3_as_logged``;
        ``largest`` |d|; ``rate``, λ a token, taken over ``block`` tokens; ``growth``, that λ over the one of single
        tokens: 1 where their terms are independent; ``curve``, a dict for each length.
    """
    bootstrap = Bootstrap([answer.prompt for answer in answers])
    sizes = np.array([len(answer.rollout) for answer in answers])
    mean = lambda column: bootstrap(lambda hits, count: hits / count, np.array(column), sizes)
    powers = [2**power for power in range(int(sizes.max()).bit_length())]
    enough = [length for length in powers if (sizes // length).sum() >= LEAST]
    block = max(enough, default=1)
    single, joint = blocks(answers, 1), blocks(answers, block)
    rate = bootstrap(loss_rate, *joint)
    growth = bootstrap(lambda *sums: loss_rate(*sums[4:]) / loss_rate(*sums[:4]), *single, *joint)
    measured = [length for length in powers if (sizes >= length).sum() >= LEAST]
    return {
        "prompts": len(set(answer.prompt for answer in answers)),
        "sequences": len(answers),
        "tokens": int(sizes.sum()),
        "longest": int(sizes.max()),
        "k3": mean([k3(answer.log_ratio).sum() for answer in answers]),
        "k3_as_logged": k3_as_logged(answers),
        "probs_diff": mean([np.abs(np.exp(a.trainer) - np.exp(a.rollout)).sum() for a in answers]),
        "clipped_tokens": mean([(answer.log_ratio > math.log(THRESHOLD)).sum() for answer in answers]),
        "largest": float(max(np.abs(answer.log_ratio).max() for answer in answers)),
        "rate": rate,
        "block": block,
        "growth": growth,
        "curve": [at_length(bootstrap, answers, length, rate) for length in sorted({*measured, *LENGTHS})],
    }


def verdict(regimes: dict[str, dict], shown: int = 8192) -> str:
    """One sentence on the regimes, fp32 aside.

    Args:
        regimes: what ``measure`` gave of each, or ``{"overflow": text}``.
        shown: the response length of which it speaks.
    """
    overflowed = [name for name, found in regimes.items() if "overflow" in found]
    tail = "".join(f"; {name} is not to be had: {regimes[name]['overflow']} (make preflight)" for name in overflowed)
    half = {name: found for name, found in regimes.items() if name != "fp32" and name not in overflowed}
    order = sorted(half, key=lambda name: half[name]["k3"].value)
    if not order:
        return "no 16-bit regime was measured" + tail
    best, *others = order
    if not others:
        return f"{best} has a k3 of {half[best]['k3'].value:.2g}, and nothing of 16 bits to compare it with" + tail
    if (prompts := half[best]["prompts"]) < LEAST_PROMPTS:
        return f"the probe does not decide from {prompts} prompts: ask for ROWS={LEAST_PROMPTS} or more{tail}"
    close = [name for name in others if half[name]["k3"].low <= half[best]["k3"].high]
    if close:
        told = ", ".join(interval(half[name]["k3"], ".2g") for name in (best, *close))
        return f"the probe does not decide between {' and '.join((best, *close))}: k3 {told}; ask for more ROWS{tail}"

    def cost(name: str) -> str:
        (point,) = [point for point in half[name]["curve"] if point["length"] == shown]
        loss, least, most = (f"{100 * float(value):.2g}" for (value,) in lost([point["ess"]]))
        return f"{loss} % ({least}–{most}) in {name}"

    ratios = {name: half[name]["k3"].value / half[best]["k3"].value for name in others}
    worse = ", ".join(f"{float(f'{ratio:.2g}'):g} times below {name}'s" for name, ratio in ratios.items())
    (point,) = [point for point in half[best]["curve"] if point["length"] == shown]
    how = "measured" if point["measured"] else f"extrapolated from {half[best]['block']} tokens"
    said = f"{best} mismatches least: its k3 of {half[best]['k3'].value:.2g} is {worse}"
    return f"{said}; weights of {shown}-token sequences cost {', '.join(map(cost, order))} of the samples ({how}){tail}"


def interval(estimate: Estimate, form: str) -> str:
    """``0.97 (0.95–0.98)``."""
    return f"{estimate.value:{form}} ({estimate.low:{form}}–{estimate.high:{form}})"


def lost(estimates: list[Estimate]) -> np.ndarray:
    """1 minus each and its interval, ``(3, estimates)``."""
    return 1 - np.array([(each.value, each.high, each.low) for each in estimates]).reshape(-1, 3).T


def plot(rows: list[tuple[str, dict]], regimes: list[str], title: str, positions: int, file: Path) -> None:
    """k3 of every row, and ESS/N of the regimes against response length.

    Args:
        rows: a label and what ``measure`` gave, in the order of the table.
        regimes: the labels whose curves are drawn.
        positions: those of the model, beyond which nothing can be generated.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    colours = {label: f"C{index}" for index, label in enumerate(regimes)}
    for place, (label, found) in enumerate(reversed(rows)):
        estimate, colour = found["k3"], colours.get(label, "grey")
        left.plot([estimate.low, estimate.high], [place, place], color=colour, linewidth=2, alpha=0.5)
        left.plot(estimate.value, place, "o", color=colour, markersize=5)
    left.set_yticks(range(len(rows)), [label for label, _ in reversed(rows)], fontsize=8)
    left.set(xscale="log", xlabel="k3 per token, nats, and its 95 % interval", title="mismatch")
    left.grid(axis="x", alpha=0.3)

    floor = 1e-9  # fp32's would stretch the axis
    for label, found in rows:
        if label not in colours:
            continue
        points = [point for point in found["curve"] if point["measured"]]
        at, (loss, least, most) = [point["length"] for point in points], lost([point["ess"] for point in points])
        right.vlines(at, np.maximum(least, floor), most, color=colours[label], linewidth=1.5)
        right.plot(at, loss, "o", markersize=4, color=colours[label])
        lengths = np.geomspace(found["block"], LENGTHS[-1], 100)
        loss, least, most = (-np.expm1(-getattr(found["rate"], each) * lengths) for each in ("value", "low", "high"))
        right.plot(lengths, loss, "--", color=colours[label], label=label)
        right.fill_between(lengths, least, most, color=colours[label], alpha=0.2)
    right.axvline(positions, color="grey", linewidth=1, linestyle=":")
    right.annotate(f" the model's {positions} positions", (positions, floor * 1.5), fontsize=8, color="grey")
    right.set(
        xlabel="response length, tokens", ylabel="1 − ESS/N: share of the samples lost", yscale="log", ylim=(floor, 2)
    )
    right.set_xscale("log", base=2)
    right.set_title("sequence weights: measured (points), extrapolated (lines)")
    right.legend(fontsize=8, loc="upper left")
    figure.suptitle(textwrap.fill(title, 170), fontsize=10)
    figure.savefig(file, dpi=120)
    plt.close(figure)
