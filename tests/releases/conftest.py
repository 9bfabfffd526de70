"""Every release, as its wheel ships it and with its stack, seen once by ``cases.py`` in the environment of workers."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from behaviours import RELEASES, entry, verdicts

from lib.patches.releases import find_release, unpacked_wheel
from lib.patches.stack import apply, load_stack
from lib.paths import REPO

PYTHON = REPO / ".venv-workers/bin/python"
RESULTS = REPO / "tests/expected/releases.json"
CASES = Path(__file__).with_name("cases.py")

MAKE_MODEL = """
import sys
from recipes.arithmetic.model import build_model, build_tokenizer
tokenizer = build_tokenizer()
for part in (tokenizer, build_model(tokenizer, seed=0)):
    part.save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The sanity task's model with its first weights, saved by the transformers that will load it."""
    folder = tmp_path_factory.mktemp("model")
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    subprocess.run([PYTHON, "-c", MAKE_MODEL, folder], env=environment, check=True, capture_output=True)
    return folder


Outcomes = dict[str, dict[str, str]]


@pytest.fixture(scope="session")
def outcomes(model, tmp_path_factory, pytestconfig) -> Iterator[Callable[[str], tuple[Outcomes, Outcomes]]]:
    """``outcomes(release)``: what its patched and its unpatched tree do: texts by strategy and case."""
    done: dict[str, tuple[Outcomes, Outcomes]] = {}

    def of(release: str) -> tuple[Outcomes, Outcomes]:
        if release not in done:
            patched, upstream = (unpacked_wheel(release, tmp_path_factory.mktemp(f"{release}-tree")) for _ in range(2))
            apply(patched)
            done[release] = tuple(run(release, tree, model, tmp_path_factory) for tree in (patched, upstream))
        return done[release]

    yield of
    if pytestconfig.getoption("write_results"):
        write_results({release: verdicts(release, *trees) for release, trees in done.items()})


def run(release: str, tree: Path, model: Path, tmp_path_factory) -> Outcomes:
    """Run all cases on two ranks against the verl in ``tree``; both must see the same."""
    out = tmp_path_factory.mktemp(f"{release}-outcomes")
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{REPO}", "OMP_NUM_THREADS": "1"}
    environment |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}  # read by verl 0.9 alone
    done = subprocess.run(
        [*torchrun, CASES, release, model, out], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    first, second = (json.loads((out / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert first == second, f"verl {release}: the ranks saw different things\n{first}\n{second}\n{done.stderr[-4000:]}"
    return first


def write_results(results: dict[str, dict]) -> None:
    """Put what was seen of these releases into tests/expected/releases.json; those that did not run stay."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for release in results:
        known[release] = entry(load_stack(find_release(release)), results[release])
    ordered = {release: known[release] for release in RELEASES if release in known}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
