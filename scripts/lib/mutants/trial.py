"""Try mutants, several at a time: each in a workspace, against its tests. Outcomes are kept in .cache/mutants."""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

from lib.errors import Refused
from lib.files import write_json
from lib.mutants.selection import select_tests
from lib.mutants.table import Mutant
from lib.mutants.workspace import Workspace
from lib.paths import CACHE, REPO

OUTCOMES = CACHE / "mutants/outcomes.json"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: the test that ``killer`` names fails on it and passes without it; empty: none does."""

    killer: str
    seconds: float


def key(mutant: Mutant, file: Path, tests: Sequence[str]) -> str:
    """Return the hash of all that an outcome is taken from: the mutant, its file, and the files of its tests."""
    digest = hashlib.sha256(json.dumps(asdict(mutant), sort_keys=True).encode())
    for path in [file, *(REPO / name for name in sorted({test.partition("::")[0] for test in tests}))]:
        for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(each.read_bytes())
    return digest.hexdigest()[:16]


class Outcomes:
    """The outcomes of earlier trials by key, in a file."""

    def __init__(self, file: Path = OUTCOMES) -> None:
        self.file, self.lock = file, Lock()
        self.known = json.loads(file.read_text()) if file.exists() else {}

    def __contains__(self, name: str) -> bool:
        return name in self.known

    def __getitem__(self, name: str) -> Outcome:
        return Outcome(**self.known[name])

    def __setitem__(self, name: str, outcome: Outcome) -> None:
        with self.lock:
            self.known[name] = asdict(outcome)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, self.known)


def try_mutants(
    mutants: Sequence[Mutant], jobs: int, show: Callable[[Mutant, Outcome], None], outcomes: Outcomes | None = None
) -> dict[str, Outcome]:
    """Return the outcome of every mutant by name; those that are known are not tried again.

    Args:
        jobs: the number of mutants that are tried at once.
        show: called for each outcome as it comes.

    Raises:
        Refused: a mutant's text does not occur exactly once, its tests did not run, or its killer fails without it.
    """
    outcomes = outcomes or Outcomes()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        workspaces = SimpleQueue()
        for number in range(jobs):
            workspaces.put(Workspace(Path(scratch) / str(number)))
        passes: dict[str, bool] = {}  # by test: whether it passes without a mutant

        @contextmanager
        def workspace() -> Iterator[Workspace]:
            taken = workspaces.get()
            try:
                yield taken
            finally:
                workspaces.put(taken)

        def try_one(mutant: Mutant) -> Outcome:
            with workspace() as space:
                tests, begin = mutant.tests or select_tests(mutant.file, REPO), time.monotonic()
                name = key(mutant, space.file(mutant), tests)
                if name not in outcomes:
                    with space.mutated(mutant):
                        killer = space.first_failure(tests, mutant)
                    test = (killer or "").removesuffix(" (stuck)")
                    if test and test not in passes:
                        passes[test] = space.first_failure([test], mutant) is None
                    if test and not passes[test]:
                        raise Refused(f"{mutant.name}: {test} fails without the mutant, too")
                    outcomes[name] = Outcome(killer or "", round(time.monotonic() - begin, 1))
                show(mutant, outcomes[name])
                return outcomes[name]

        return dict(zip((mutant.name for mutant in mutants), pool.map(try_one, mutants), strict=True))
