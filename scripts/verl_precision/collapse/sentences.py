"""Describe the outcome of one bf16 run and one fp16 run in three sentences."""

from verl_precision.collapse.outcomes import FIRST, LAST, RecallOutcome
from verl_precision.format import number

COLLAPSE = 0.5  # a run collapsed if its last accuracy is below this fraction of its first


def course(outcome: RecallOutcome) -> str:
    """Describe how the accuracy developed, as the end of a clause, by the rules of the plan in docs/log."""
    first, last = outcome.first, outcome.last
    verb = "rose" if last > first else "collapsed" if last < COLLAPSE * first else "did not rise"
    return f"{verb} in {outcome.run.precision} ({first:.2f} to {last:.2f})"


def sentences(bf16: RecallOutcome, fp16: RecallOutcome) -> list[str]:
    """Return three sentences: on the accuracy, on the mismatch, and on what they do not show."""
    steps = len(fp16.accuracy)
    ess = [number(each.median_ess, ".2g") for each in (bf16, fp16)]
    return [
        f"Accuracy {course(bf16)} and {course(fp16)}: means of the first {FIRST} and the last {LAST} of {steps} steps.",
        f"Over an answer of {bf16.run.length + 1} tokens, k3 at the first step adds up to {bf16.total_k3:.2g} nats in "
        f"bf16 and {fp16.total_k3:.2g} in fp16; the effective sample size of the weights is {ess[0]} and {ess[1]} "
        "of the batch (median step).",
        f"This is one seed of a constructed case, logits lifted by {bf16.run.lift} and weights that are not truncated: "
        "docs/results/collapse has three seeds, the controls and the limits.",
    ]
