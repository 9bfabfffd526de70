"""Every release, as its wheel ships it and with its stack, run once through ``cases.py`` by its own workers."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from behaviours import RELEASES, entry, verdicts
from support.recorded import fingerprint, mark_recorded
from support.trees import patched_tree
from worker_process import save_model, worker_environment, worker_python

from lib.patches.releases import VERL, find_release
from lib.patches.stack import load_stack
from lib.patches.wheels import unpacked_wheel
from lib.paths import REPO

RESULTS = REPO / "tests/expected/releases.json"
CASES = Path(__file__).with_name("cases.py")


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items):
    mark_recorded(items, VERL, RESULTS, CASES.parent)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The sanity task's model with its first weights."""
    folder = tmp_path_factory.mktemp("model")
    save_model(RELEASES[-1], folder)
    return folder


Outcomes = dict[str, dict[str, str]]


@pytest.fixture(scope="session")
def outcomes(model, tmp_path_factory, pytestconfig) -> Iterator[Callable[[str], tuple[Outcomes, Outcomes]]]:
    """``outcomes(release)``: the outcomes of its patched and its unpatched tree, by strategy and case."""
    done: dict[str, tuple[Outcomes, Outcomes]] = {}

    def of(release: str) -> tuple[Outcomes, Outcomes]:
        if release not in done:
            folder = tmp_path_factory.mktemp(f"{release}-trees")
            patched = patched_tree(release, folder / "patched", pytestconfig.getoption("verl_tree"))
            upstream = unpacked_wheel(release, folder / "upstream")
            done[release] = tuple(run(release, tree, model, tmp_path_factory) for tree in (patched, upstream))
        return done[release]

    yield of
    if pytestconfig.getoption("write_results"):
        write_results({release: verdicts(release, *trees) for release, trees in done.items()})


def run(release: str, tree: Path, model: Path, tmp_path_factory) -> Outcomes:
    """Run all cases on two ranks against the verl in ``tree``; both must have the same outcomes."""
    out = tmp_path_factory.mktemp(f"{release}-outcomes")
    command = [worker_python(release), "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", CASES, release, model, out]
    done = subprocess.run(command, env=worker_environment(tree), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    first, second = (json.loads((out / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert first == second, f"verl {release}: the ranks differ\n{first}\n{second}\n{done.stderr[-4000:]}"
    return first


def write_results(results: dict[str, dict]) -> None:
    """Write the verdicts on these releases into tests/expected/releases.json; keep those of other releases."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for release in results:
        found = find_release(release)
        known[release] = entry(load_stack(found), results[release], fingerprint(found, CASES.parent))
    ordered = {release: known[release] for release in RELEASES if release in known}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
