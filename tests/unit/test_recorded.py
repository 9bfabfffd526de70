"""``support.recorded``: recorded outcomes are valid for what they were taken from, and no longer."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import recorded
from support.recorded import UpstreamOutcomes, mark_recorded, release_fingerprint, representatives
from support.trees import edit

from lib.patches.releases import OAT, VERL, load_releases
from lib.paths import REPO

SUITES = {VERL: ("releases", "verl"), OAT: ("oat", "oat")}
HOOK = "fsdp-compute-in-the-configured-dtype.patch"


@pytest.mark.parametrize("framework", SUITES, ids=lambda framework: framework.name)
def test_outcomes_of_every_release_are_valid(framework):
    results, suite = SUITES[framework]
    valid = recorded.recorded(framework, REPO / f"tests/expected/{results}.json", REPO / f"tests/conformance/{suite}")
    assert valid == set(load_releases(framework=framework)), "outcomes are out of date: CONTRIBUTING.md"


@pytest.fixture
def suite(tmp_path) -> Path:
    """A folder of test code, with the recorded outcomes of all releases beside it."""
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "cases.py").write_text("one")
    entries = {name: {"fingerprint": release_fingerprint(release, folder)} for name, release in load_releases().items()}
    (tmp_path / "results.json").write_text(json.dumps(entries))
    return folder


def live(suite: Path) -> set[str]:
    """Return the releases whose tests are not marked ``recorded``."""
    marked = {name: [] for name in load_releases()}
    item = partial(SimpleNamespace, path=suite / "test_it.py", fixturenames=["outcomes"])
    items = [
        item(callspec=SimpleNamespace(params={"release": name}), add_marker=marks.append)
        for name, marks in marked.items()
    ]
    mark_recorded(items, VERL, suite.parent / "results.json", suite)
    return {name for name, marks in marked.items() if marks != ["recorded"]}


def test_changed_hook_runs_its_release_again_and_changed_test_code_all(suite, tmp_path, monkeypatch):
    assert representatives(VERL) == {"0.5.0", "0.7.1", "0.9.1"} and representatives(OAT) == {"0.2.2", "0.2.4"}
    for folder in ("patches/verl", "configs/precision"):
        shutil.copytree(REPO / folder, tmp_path / folder)
    monkeypatch.setattr(recorded, "load_stack", partial(recorded.load_stack, project=tmp_path))
    assert live(suite) == representatives(VERL)
    (hook,) = (tmp_path / "patches/verl/v0.6.1").glob(f"*{HOOK}")
    edit(hook, "Precision.of_worker(", "Precision.of_worker( ")
    assert live(suite) == representatives(VERL) | {"0.6.1"}
    (suite / "cases.py").write_text("two")
    assert live(suite) == set(load_releases())


@pytest.mark.parametrize("changed", ["cases.py", "more_cases.py", "all.lock"])
def test_upstream_outcomes_are_valid_for_the_test_code_alone(suite, tmp_path, monkeypatch, changed):
    """A changed stack keeps them; a changed, new or locked file does not."""
    (suite / "all.lock").write_text("one")
    releases = load_releases()

    def upstream() -> UpstreamOutcomes:
        valid_for = partial(release_fingerprint, suite=suite, patched=False)
        return UpstreamOutcomes(tmp_path / "upstream.json", lambda release: valid_for(releases[release]))

    upstream().write("0.6.1", {"dtype": "bfloat16"})
    upstream().write("0.7.1", {"dtype": "bfloat16"})
    upstream().write("0.7.1", {"scale": [1, float("inf")]})
    monkeypatch.setattr(recorded, "load_stack", lambda release: SimpleNamespace(id="0" * 12))
    assert upstream().of("0.6.1") == {"dtype": "bfloat16"}
    assert upstream().of("0.7.1") == {"dtype": "bfloat16", "scale": [1, float("inf")]}
    assert upstream().of("0.9.1") == {}
    (suite / changed).write_text("two")
    assert upstream().of("0.6.1") == {}
    upstream().write("0.7.1", {"growth": None})
    assert upstream().of("0.7.1") == {"growth": None}
