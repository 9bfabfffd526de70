"""Describe the outcome of one bf16 run and one fp16 run of the recall task."""

from statistics import fmean, median

from verl_precision.facts.metrics import K3_KL, REWARD
from verl_precision.format import number
from verl_precision.report.catalog import ESS, RESPONSE_LENGTH, finite
from verl_precision.report.logged_run import LoggedRun

FIRST, LAST = 3, 10  # steps whose mean accuracy is the first, and the last
FEWEST_STEPS = 20  # of a run whose first and last accuracy are compared
COLLAPSED = 0.5  # a run collapsed if its last accuracy is below this fraction of its first


def first_and_last(run: LoggedRun) -> tuple[float, float]:
    """Return the mean accuracy of the first ``FIRST`` and of the last ``LAST`` steps; the reward is 0 or 1."""
    accuracy = finite(run.steps, REWARD)
    return fmean(accuracy[:FIRST]), fmean(accuracy[-LAST:])


def total_k3(run: LoggedRun) -> float:
    """Return T·k3 at the first step, before training changes it: tokens of an answer times k3 per token, in nats."""
    first = run.steps[min(run.steps)]
    return first[RESPONSE_LENGTH] * first[K3_KL]


def describe_course(run: LoggedRun) -> str:
    """Describe how the accuracy developed, as the end of a clause, by the rules of the plan in docs/log."""
    first, last = first_and_last(run)
    verb = "rose" if last > first else "collapsed" if last < COLLAPSED * first else "did not rise"
    return f"{verb} in {run.label} ({first:.2f} to {last:.2f})"


def describe_pair(bf16: LoggedRun, fp16: LoggedRun) -> list[str]:
    """Return three sentences: on the accuracy, on the mismatch, and on their limits."""
    ess = [number(median(values) if (values := finite(run.steps, ESS)) else None, ".2g") for run in (bf16, fp16)]
    return [
        f"Accuracy {describe_course(bf16)} and {describe_course(fp16)}: means of the first {FIRST} and the last {LAST} "
        f"of {len(fp16.steps)} steps.",
        f"Over an answer, k3 at the first step adds up to {total_k3(bf16):.2g} nats in bf16 and {total_k3(fp16):.2g} "
        f"in fp16; the effective sample size of the weights is {ess[0]} and {ess[1]} of the batch (median step).",
        "This is one seed of a constructed case, with lifted logits and weights that are not truncated: "
        "docs/results/collapse has three seeds, the controls and the limits.",
    ]
