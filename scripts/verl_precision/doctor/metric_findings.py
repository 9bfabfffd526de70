"""Findings on what a run does with the mismatch: it is not measured, or sequence-level weights are made of it."""

from collections.abc import Iterator
from typing import Any

from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import DtypeResolver
from verl_precision.sequence_weights import TRUNCATED, UNTRUNCATED

SEQUENCE_WEIGHTS = "algorithm.rollout_correction.rollout_is"
TRUNCATION = "algorithm.rollout_correction.rollout_is_threshold"
BYPASS = "algorithm.rollout_correction.bypass_mode"
MISMATCH_FREQ = "trainer.mismatch_freq"
MEASURES = "verl/utils/mismatch.py"  # of a patched tree: it measures the mismatch in bypass mode


def measurable(resolver: DtypeResolver) -> bool:
    """Return whether the tree measures the mismatch in bypass mode."""
    return (resolver.tree.root / MEASURES).exists()


def mismatch_freq(resolver: DtypeResolver) -> Any:
    """Return the steps between two measurements in bypass mode as the trainer reads them, -1 where nothing does."""
    return resolver.config.values["trainer"].get("mismatch_freq", -1) if measurable(resolver) else -1


def refused_frequency(resolver: DtypeResolver) -> str | None:
    """Return the line with which a patched trainer refuses the frequency in bypass mode; None without one."""
    freq = mismatch_freq(resolver)
    if isinstance(freq, int) or not resolver.config.get(BYPASS):
        return None
    return f"ValueError: {MISMATCH_FREQ}={freq} must be a whole number of steps, or -1 to measure none"


def metric_findings(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield bypass mode, in which the trainer computes no log-probabilities to compare, where nothing measures them.

    Yield also a frequency of measuring them that is not allowed, or not read.
    """
    freq = mismatch_freq(resolver)
    if not resolver.config.get(BYPASS):
        if freq != -1:
            effect = "is read in bypass mode alone: else the trainer computes its log-probabilities at every step"
            yield Finding(MISMATCH_FREQ, freq, effect, f"{MISMATCH_FREQ}=-1", applies=False)
        return
    if freq != -1 and (freq is True or freq < 1):
        effect = "is neither a whole number of at least 1, in steps, nor -1, which measures none"
        yield Finding(MISMATCH_FREQ, freq, effect, f"{MISMATCH_FREQ}=10")
    if freq > 0:
        return
    hidden = "training/rollout_probs_diff_* (the v1 trainer also rollout_corr/*)"
    effect = f"leaves {hidden} out of the metrics: the rollout's log-probabilities stand in for the trainer's"
    yield Finding(BYPASS, True, effect, f"{MISMATCH_FREQ}=10" if measurable(resolver) else f"{BYPASS}=false")


def weight_findings(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield sequence-level importance weights where trainer or rollout computes in bfloat16."""
    sides = (resolver.effective_dtype(name) for name in ("actor.compute", "rollout.weights"))
    if resolver.config.get(SEQUENCE_WEIGHTS) != "sequence" or "bfloat16" not in sides:
        return
    length, threshold = resolver.config.get("data.max_response_length"), resolver.config.get(TRUNCATION)
    truncated = isinstance(threshold, int | float) and threshold <= 2
    bounds, weights = (TRUNCATED, "weights truncated at 2") if truncated else (UNTRUNCATED, "untruncated weights")
    effect = (
        f"weights whole answers by their mismatch, which is large in bfloat16. With {weights}, a small model learned "
        f"where k3 times the tokens of an answer was at most {bounds.learned:g}, and collapsed from "
        f"{bounds.collapsed:g} on"
    )
    if isinstance(length, int) and length > 0:
        learned, collapsed = (f"{bound / length:.1e}" for bound in bounds)
        effect += f": at {length} tokens, a rollout_corr/k3_kl of {learned} and {collapsed}"
    mend = "+precision=fp16, or measure it first: make probe"
    yield Finding(SEQUENCE_WEIGHTS, "sequence", effect, mend)
