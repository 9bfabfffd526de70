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


def by_case(
    *cases: str, fsdp: str = "slow", ranks: int = 2, live: bool = False, slow: bool = False
) -> pytest.MarkDecorator:
    """Parametrize a test by ``row``: cases under FSDP2 and FSDP1.

    Args:
        fsdp: "quick" if FSDP1 has code of its own to test, "slow" if it only repeats the test (the conformance suite
            runs 0.9.1 under both), "alone" for FSDP1 without FSDP2, "never".
        slow: whether all rows repeat what others test.
    """
    strategies = {"alone": ("fsdp",), "never": ("fsdp2",)}.get(fsdp, ("fsdp", "fsdp2"))
    rows = []
    for case in cases:
        for strategy in strategies:
            repeats = slow or (strategy == "fsdp" and fsdp == "slow")
            row = Row(case, strategy, ranks, live)
            rows.append(pytest.param(row, id=f"{case}-{strategy}", marks=[pytest.mark.slow] if repeats else []))
    return pytest.mark.parametrize("row", rows)
