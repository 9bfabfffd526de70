"""Summarize what a regime costs in one configuration: time, memory, and what the host asks of the device."""

import statistics
from dataclasses import dataclass

BASE = "bf16"


@dataclass(frozen=True)
class RegimeTiming:
    """The cost of one regime in one configuration; a row of the CSV.

    Args:
        part: "optimizer step", "forward and backward" or "training step".
        subject: the optimizer, or the model and its number of layers.
        parameters_m: parameters in millions.
        regime: "all" in the row of a configuration that was left out.
        tokens: of one call, None for an optimizer step.
        seconds: median over ``rounds``.
        ratio: median of the ratio to bf16 in the same round, None where bf16 was left out.
        peak_gib: peak memory above the weights.
        launches, synchronizations, host_reads: of one call, see :mod:`verl_precision.bench.host_calls`.
        left_out: why there is no measurement, "" where there is one.
    """

    part: str
    subject: str
    parameters_m: float
    regime: str
    ranks: int = 1
    tokens: int | None = None
    seconds: float | None = None
    ratio: float | None = None
    rounds: int = 0
    peak_gib: float | None = None
    launches: int | None = None
    synchronizations: int | None = None
    host_reads: int | None = None
    left_out: str = ""

    @property
    def name(self) -> str:
        """The name of the configuration, which its regimes share."""
        return f"{self.part}, {self.subject}, {self.parameters_m:g} M, {self.ranks} rank(s)"


def timings_of(
    times: dict[str, list[float]],
    counts: dict[str, dict[str, int | None]],
    peaks: dict[str, float] | None = None,
    **configuration,
) -> list[RegimeTiming]:
    """Summarize the seconds of each regime by round.

    Args:
        counts: what the host asks of the device in one call, by regime.
        peaks: peak memory above the weights in GiB, by regime.
    """
    base = times.get(BASE, [])
    ratios = {name: [t / b for t, b in zip(times[name], base, strict=True)] for name in times if base}
    return [
        RegimeTiming(
            **configuration,
            **counts[name],
            regime=name,
            seconds=statistics.median(times[name]),
            ratio=statistics.median(ratios[name]) if base else None,
            rounds=len(times[name]),
            peak_gib=peaks and peaks[name],
        )
        for name in times
    ]


def one_line(rows: list[RegimeTiming]) -> str:
    """Return the timings of one configuration as a line for the screen."""
    results = [f"{row.regime} {row.left_out or f'{row.seconds * 1e3:.1f} ms'}" for row in rows]
    return f"{rows[0].name}: {', '.join(results)}"
