"""Try mutants, several at a time: each in a workspace, against its tests. Outcomes are kept in .cache/mutants."""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

from mutants.selection import select_tests
from mutants.table import Mutant
from mutants.workspace import LATE, STUCK, Workspace
from verl_precision.errors import Refused
from verl_precision.files import write_json
from verl_precision.paths import CACHE, REPO

OUTCOMES = CACHE / "mutants/outcomes.json"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        killer: the test that fails on it and passes without it; empty: all pass.
        seconds: how long that took.
        problem: why it could not be tried; empty: it was.
    """

    killer: str
    seconds: float
    problem: str = ""


def key(mutant: Mutant, file: Path, tests: Sequence[str]) -> str:
    """Return the key of an outcome: the hash of the mutant, its file, the files of its tests and their helpers, which
    are the other files of their folder, tests/conftest.py and tests/support."""
    paths = {REPO / test.partition("::")[0] for test in tests}
    shared = {each for path in paths for each in path.parent.glob("*.py") if not each.name.startswith("test_")}
    shared |= {*REPO.glob("tests/conftest.py"), *REPO.glob("tests/support/*.py")}
    digest = hashlib.sha256(json.dumps(asdict(mutant), sort_keys=True).encode())
    for path in [file, *sorted(paths), *sorted(shared)]:
        for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(each.read_bytes())
    return digest.hexdigest()[:16]


class Outcomes:
    """The latest outcome of every mutant by name, in a file, each with the key that it is valid under.

    Args:
        hints: killers of earlier runs by name, to try first where the file has no outcome of a mutant.
    """

    def __init__(self, file: Path = OUTCOMES, hints: Mapping[str, str] | None = None) -> None:
        self.file, self.lock, self.hints = file, Lock(), hints or {}
        self.known = json.loads(file.read_text()) if file.exists() else {}

    def get(self, name: str, key: str) -> Outcome | None:
        """Return the outcome of a mutant; None: there is none, or under another key."""
        entry = self.known.get(name, {})
        return Outcome(entry["killer"], entry["seconds"]) if entry.get("key") == key else None

    def last_killer(self, name: str) -> str:
        """Return the test that killed a mutant last, under whatever key; empty: none did."""
        return self.known.get(name, {}).get("killer") or self.hints.get(name, "")

    def keep(self, name: str, key: str, outcome: Outcome) -> None:
        """Write an outcome to the file."""
        with self.lock:
            self.known[name] = {"key": key, "killer": outcome.killer, "seconds": outcome.seconds}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, self.known)


def find_killer(mutant: Mutant, space: Workspace, tests: Sequence[str], last: str) -> str:
    """Return the first of ``tests`` that fails on a mutant, empty if all pass; the one that killed it last goes first.

    Raises:
        Refused: the mutant's text does not occur exactly once, or its tests did not run.
    """
    last = bare(last)
    with space.mutated(mutant):
        if last:
            try:
                if killer := space.first_failure([last], mutant):
                    return killer
            except Refused:  # it is gone, or no test of `make test` any more
                pass
        return space.first_failure(tests, mutant) or ""


def bare(killer: str) -> str:
    """Return the test of a killer, without ``LATE`` and ``STUCK``; its own id may have parentheses."""
    return killer.removesuffix(LATE).removesuffix(STUCK)


def try_mutants(
    mutants: Sequence[Mutant], jobs: int, show: Callable[[Mutant, Outcome], None], outcomes: Outcomes | None = None
) -> dict[str, Outcome]:
    """Return the outcome of every mutant by name; those that are known are not tried again.

    Args:
        jobs: the number of mutants that are tried at once.
        show: called for each outcome as it comes.
    """
    outcomes = outcomes or Outcomes()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        workspaces = SimpleQueue()
        for number in range(jobs):
            workspaces.put(Workspace(Path(scratch) / str(number)))
        passes: dict[str, bool] = {}  # by tests: whether they pass without a mutant

        def judge(mutant: Mutant, space: Workspace) -> Outcome:
            tests, begin = mutant.tests or select_tests(mutant.file, REPO), time.monotonic()
            valid_under = key(mutant, space.file(mutant), tests)
            if known := outcomes.get(mutant.name, valid_under):
                return known
            killer = find_killer(mutant, space, tests, outcomes.last_killer(mutant.name))
            # All of them must end in time, where none did; else the killer alone.
            again = tuple(tests) if killer.endswith(LATE) else (bare(killer),) if killer else ()
            if again and again not in passes:
                passes[again] = space.first_failure(again, mutant) is None
            if again and not passes[again]:
                raise Refused(f"{mutant.name}: {killer} fails without the mutant, too")
            outcome = Outcome(killer, round(time.monotonic() - begin, 1))
            outcomes.keep(mutant.name, valid_under, outcome)
            return outcome

        def try_one(mutant: Mutant) -> Outcome:
            space = workspaces.get()
            try:
                outcome = judge(mutant, space)
            except Refused as refusal:  # the others are tried all the same
                outcome = Outcome("", 0, str(refusal))
            finally:
                workspaces.put(space)
            show(mutant, outcome)
            return outcome

        return dict(zip((mutant.name for mutant in mutants), pool.map(try_one, mutants), strict=True))
