"""Tests by the case of engine_cases.py that they read, so that a session runs what its tests need and no more."""

from dataclasses import dataclass

import pytest

from support.recorded import BENEATH, UpstreamOutcomes, fingerprint
from verl_precision.patch.releases import find_release
from verl_precision.paths import REPO
from verl_precision.run.job import CPU_PLATFORM

FOLDER = REPO / "tests/engine"


def upstream_outcomes() -> UpstreamOutcomes:
    """Return the recorded outcomes of the engine's cases on an unpatched tree."""
    apart = ("test_", "flowrl", "conftest")  # what no case of an unpatched tree imports
    code = [file for file in sorted(FOLDER.glob("*.py")) if not file.name.startswith(apart)]

    def valid_for(release: str) -> str:
        wheel, environment = find_release(release).wheel_sha256, str(CPU_PLATFORM)
        return fingerprint(f"{wheel} {environment}", *code, REPO / "tests/conftest.py", *BENEATH)

    return UpstreamOutcomes(REPO / "tests/expected/engine-upstream.json", valid_for)


@dataclass(frozen=True)
class Row:
    """A case under a strategy; ``live`` if its outcome on an unpatched tree depends on the processor."""

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
            runs dtypes, overflows, storms and checkpoints of 0.9.1 under both), "never".
    """
    rows = []
    for case in cases:
        for strategy in ("fsdp2",) if fsdp == "never" else ("fsdp", "fsdp2"):
            row = Row(case, strategy, ranks, live)
            marks = [pytest.mark.slow] if (strategy, fsdp) == ("fsdp", "slow") else []
            rows.append(pytest.param(row, id=f"{case}-{strategy}", marks=marks))
    return pytest.mark.parametrize("row", rows)
