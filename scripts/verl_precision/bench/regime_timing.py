"""Summarize what a regime costs in one configuration: time, memory, and what the host asks of the device."""

import statistics
from dataclasses import asdict, dataclass

from verl_precision.bench.host_calls import HostCalls

BASE = "bf16"


@dataclass(frozen=True)
class RegimeTiming:
    """The cost of one regime in one configuration; a row of the CSV.

    Args:
        what: "optimizer step", "forward and backward" or "training step".
        optimizer: "" without one.
        parameters_m: parameters in millions.
        regime: "all" in the row of a configuration that was left out.
        seconds: median over ``rounds``.
        ratio: median of the ratio to bf16 in the same round, ``None`` where bf16 was left out.
        peak_gib: peak memory above the weights.
        model: name and number of layers, "" for an optimizer step.
        tokens: of one call.
        operators, host_reads, launches, synchronizations, host_copies: of one call, see :class:`HostCalls`.
        left_out: why there is no measurement, "" where there is one.
    """

    what: str
    optimizer: str
    parameters_m: float
    ranks: int
    regime: str
    seconds: float | None = None
    ratio: float | None = None
    rounds: int = 0
    peak_gib: float | None = None
    model: str = ""
    tokens: int | None = None
    operators: int | None = None
    host_reads: int | None = None
    launches: int | None = None
    synchronizations: int | None = None
    host_copies: int | None = None
    left_out: str = ""

    @property
    def name(self) -> str:
        """Return the name of the configuration, which its regimes share."""
        names = [name for name in (self.what, self.optimizer, self.model) if name]
        return ", ".join([*names, f"{self.parameters_m:g} M", f"{self.ranks} rank(s)"])


def timings_of(
    times: dict[str, list[float]], calls: dict[str, HostCalls], peaks: dict[str, float] | None = None, **configuration
) -> list[RegimeTiming]:
    """Summarize the seconds of each regime by round.

    Args:
        calls: what the host asks of the device in one call, by regime.
        peaks: peak memory above the weights in GiB, by regime.
    """
    base = times.get(BASE, [])
    ratios = {name: [t / b for t, b in zip(times[name], base, strict=True)] for name in times if base}
    return [
        RegimeTiming(
            **configuration,
            **asdict(calls[name]),
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
    first = rows[0]
    if first.left_out:
        return f"{first.name}: left out: {first.left_out}"
    ratios = ", ".join(f"{row.regime} {row.ratio:.3f}" for row in rows[1:] if row.ratio is not None)
    return (
        f"{first.name}: {first.regime} {first.seconds * 1e3:.1f} ms; × {BASE}: {ratios or 'n/a'}; {first.rounds} rounds"
    )
