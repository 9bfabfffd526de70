"""Try mutants, several at a time: each in a workspace, against its tests. Outcomes are kept in .cache/mutants."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

from mutants.selection import select_tests, with_helpers
from mutants.table import Mutant
from mutants.workspace import Workspace
from verl_precision.errors import Refused
from verl_precision.files import write_json
from verl_precision.paths import CACHE, REPO

OUTCOMES = CACHE / "mutants/outcomes.json"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a mutant."""

    killer: str = ""  # the test that fails on it and passes without it; empty: all tests pass
    problem: str = ""  # why it could not be tried; empty: it was


def key(mutant: Mutant, file: Path, tests: Sequence[str]) -> str:
    """Return the hash of a mutant, its file, its tests and their helpers: what its outcome depends on."""
    digest = hashlib.sha256(json.dumps(asdict(mutant), sort_keys=True).encode())
    paths = {REPO / test.partition("::")[0] for test in tests}
    for path in [file, *sorted(with_helpers(paths, REPO))]:
        for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(each.read_bytes())
    return digest.hexdigest()[:16]


def try_mutants(
    mutants: Sequence[Mutant], jobs: int, show: Callable[[Mutant, Outcome], None], file: Path = OUTCOMES
) -> dict[str, Outcome]:
    """Return the outcome of every mutant by name; those that are known are not tried again.

    Args:
        jobs: the number of mutants that are tried at once.
        show: called for each outcome as it comes.
        file: the latest outcomes by name, each with the key under which it is valid.
    """
    known = json.loads(file.read_text()) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    lock, outcomes = Lock(), {}
    passes: dict[str, bool] = {}  # by test: whether it passes without a mutant

    def find_killer(mutant: Mutant, space: Workspace) -> str:
        tests = mutant.tests or select_tests(mutant.file, REPO)
        valid_under, last = key(mutant, space.file(mutant), tests), known.get(mutant.name, {})
        if last.get("key") == valid_under:
            return last["killer"]
        with space.mutated(mutant):
            killer = ""
            if last.get("killer", "-").startswith(tuple(tests)):  # it goes first
                with suppress(Refused):  # it is gone, or no test of `make test` any more
                    killer = space.first_failure([last["killer"]], mutant)
            killer = killer or space.first_failure(tests, mutant)
        if killer and killer not in passes:
            passes[killer] = not space.first_failure([killer], mutant)
        if killer and not passes[killer]:
            raise Refused(f"{mutant.name}: {killer} fails without the mutant, too")
        with lock:
            known[mutant.name] = {"key": valid_under, "killer": killer}
            write_json(file, known)
        return killer

    def work(folder: Path, chosen: Sequence[Mutant]) -> None:
        with Workspace(folder) as space:
            for mutant in chosen:
                try:
                    outcomes[mutant.name] = Outcome(find_killer(mutant, space))
                except Refused as refusal:  # the others are tried all the same
                    outcomes[mutant.name] = Outcome(problem=str(refusal))
                show(mutant, outcomes[mutant.name])

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        workers = [pool.submit(work, Path(scratch, str(each)), mutants[each::jobs]) for each in range(jobs)]
        for worker in workers:
            worker.result()
    return outcomes
