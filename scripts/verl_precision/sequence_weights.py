"""Predict whether training with sequence-level importance weights survives a mismatch.

The measure is T·k3, the tokens of an answer times k3 per token, in nats. If the mismatches of the tokens are
independent, it is half the variance of the weights' logarithm. The bounds are those of the runs in
docs/results/collapse, in which T·k3 is that of the first step: a small model, one task and one learning rate.
"""

from typing import NamedTuple


class Bounds(NamedTuple):
    """Values of T·k3 at the first step, in nats, at the default learning rate.

    Up to ``learned`` no run ended below the lowest run in fp16 with such weights; from ``collapsed`` on, every run
    ended below half of its first accuracy.
    """

    learned: float
    collapsed: float


UNTRUNCATED = Bounds(0.54, 2.3)
TRUNCATED = Bounds(0.15, 8.2)  # weights cut at 2


def prediction(least: float, most: float) -> str:
    """Return whether untruncated weights hold, do not hold, or may or may not hold at a T·k3 in this interval."""
    if most <= UNTRUNCATED.learned:
        return "hold"
    return "do not hold" if least >= UNTRUNCATED.collapsed else "may or may not hold"
