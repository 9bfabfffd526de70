"""Predict whether training with untruncated sequence-level importance weights survives a mismatch.

The measure is T·k3, the tokens of an answer times k3 per token, in nats. If the mismatches of the tokens are
independent, it is half the variance of the weights' logarithm, and ESS/N is exp(−2·T·k3). The two bounds are those of
the runs in docs/results/collapse: a small model, one task and one learning rate.
"""

LEARNED = 0.54  # nats; every run up to here learned
COLLAPSED = 2.0  # nats; every run from here on collapsed


def prediction(least: float, most: float) -> str:
    """Return what the weights do at a T·k3 from ``least`` to ``most``: hold, do not hold, may or may not hold."""
    return "hold" if most <= LEARNED else "do not hold" if least >= COLLAPSED else "may or may not hold"
