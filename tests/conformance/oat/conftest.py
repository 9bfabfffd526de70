"""Every release of OAT, as its wheel ships it and with its stack, run once through ``oat_cases`` in its environment."""

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from oat_behaviours import BEHAVIOURS, RELEASES, RESULTS, not_run
from support.conformance import verdicts, write_results
from support.recorded import mark_recorded
from support.trees import patched_tree

from lib.patches.releases import OAT
from lib.patches.wheels import unpacked_wheel
from lib.paths import REPO

PYTHON = REPO / ".venv-workers/bin/python"
RUNNER = Path(__file__).with_name("oat_runner.py")

Outcomes = Callable[[str, bool], dict[str, str]]


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items):
    mark_recorded(items, OAT, RESULTS, RUNNER.parent)


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory, pytestconfig) -> Iterator[Outcomes]:
    """``outcomes(release, patched)``: the outcomes of that tree by case; one process runs all trees."""
    done: dict[tuple[str, bool], dict[str, str]] = {}
    folder = tmp_path_factory.mktemp("oat")
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    with (folder / "runner.log").open("w") as log:
        runner = subprocess.Popen(
            [PYTHON, RUNNER, folder],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def of(release: str, patched: bool) -> dict[str, str]:
        if (release, patched) not in done:
            tree = tmp_path_factory.mktemp(f"oat-{release}")
            if patched:
                tree = patched_tree(release, tree, pytestconfig.getoption("oat_tree"), OAT)
            else:
                unpacked_wheel(release, tree, OAT)
            done[release, patched] = run(runner, tree, tmp_path_factory.mktemp(f"oat-{release}-out"))
        return done[release, patched]

    yield of
    runner.stdin.close()
    assert runner.wait(timeout=60) == 0, (folder / "runner.log").read_text()[-4000:]
    if pytestconfig.getoption("write_results"):
        ran = [release for release in RELEASES if (release, True) in done]
        seen = {release: verdicts(release, BEHAVIOURS, of) | not_run() for release in ran}
        write_results(seen, RESULTS, OAT, RUNNER.parent)


def run(runner: subprocess.Popen, tree: Path, out: Path) -> dict[str, str]:
    """Have ``runner`` run all cases on the OAT in ``tree``; return outcomes by case, each rank's where they differ."""
    runner.stdin.write(json.dumps({"tree": str(tree), "out": str(out), "cases": []}) + "\n")
    runner.stdin.flush()
    codes = json.loads(runner.stdout.readline())
    if codes != [0, 0, 0]:
        logs = "\n".join(path.read_text()[-3000:] for path in sorted(out.glob("*.log")))
        return defaultdict(lambda: f"exit codes {codes}\n{logs}")
    first, second = (json.loads((out / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    both = {case: (text, second[case]) for case, text in first.items()}
    return {case: one if one == two else f"rank 0: {one}; rank 1: {two}" for case, (one, two) in both.items()}
