"""Describe the outcome of one bf16 run and one fp16 run in three sentences that claim no more than these runs show."""

from lib.collapse.outcomes import FIRST, LAST, RecallOutcome
from lib.format import number

COLLAPSE = 0.5  # a run whose last accuracy is below this share of its first collapsed


def course(outcome: RecallOutcome) -> str:
    """Describe how the accuracy developed, as a clause, by the rules of the plan in docs/log."""
    first, last = outcome.first, outcome.last
    verb = "learned" if last > first else "collapsed" if last < COLLAPSE * first else "did not learn"
    return f"{outcome.run.precision} {verb}: {outcome.first:.2f} to {outcome.last:.2f}"


def sentences(bf16: RecallOutcome, fp16: RecallOutcome) -> list[str]:
    """Return three sentences: on the accuracy, on the mismatch, and on what they do not show."""
    steps = len(fp16.accuracy)
    ess = [number(each.median_ess, ".2g") for each in (bf16, fp16)]
    return [
        f"{course(bf16)}; {course(fp16)} (share of right answers, mean of the first {FIRST} and of the last {LAST} of "
        f"{steps} steps).",
        f"Over an answer of {bf16.run.length + 1} tokens, k3 at the first step adds up to {bf16.total_k3:.2g} nats in "
        f"bf16 and {fp16.total_k3:.2g} in fp16; the effective share of the weighted samples is {ess[0]} and {ess[1]} "
        "(median step).",
        f"This is one seed of a constructed case, logits lifted by {bf16.run.lift} and weights that are not truncated: "
        "docs/results/collapse has three seeds, the controls and the limits.",
    ]
