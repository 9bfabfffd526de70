"""Tests by the case of engine_cases.py that they read, so that a session runs what its tests need and no more."""

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Row:
    """A case under a strategy; ``live`` if its outcome on an unpatched tree depends on the processor, to the bit."""

    case: str
    strategy: str
    ranks: int
    live: bool

    @property
    def key(self) -> str:
        return f"{self.case} {self.strategy} {self.ranks}"


def by_case(*cases: str, fsdp: str = "slow", ranks: int = 2, live: bool = False) -> pytest.MarkDecorator:
    """Parametrize a test by ``row``: cases under FSDP2 and FSDP1.

    Args:
        fsdp: "quick" if FSDP1 has code of its own to test, "slow" if it only repeats the test (the conformance suite
            runs 0.9.1 under both), "never".
    """
    rows = []
    for case in cases:
        for strategy in ("fsdp2",) if fsdp == "never" else ("fsdp", "fsdp2"):
            row = Row(case, strategy, ranks, live)
            marks = [pytest.mark.slow] if (strategy, fsdp) == ("fsdp", "slow") else []
            rows.append(pytest.param(row, id=f"{case}-{strategy}", marks=marks))
    return pytest.mark.parametrize("row", rows)
