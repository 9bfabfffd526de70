"""``support.recorded``: recorded outcomes are valid for what they were taken from, and no longer."""

from dataclasses import replace

import pytest
from support import recorded
from support.recorded import fingerprint, representatives

from lib.patches.releases import OAT, VERL, Framework
from lib.paths import REPO

SUITES = {VERL: ("releases", "verl"), OAT: ("oat", "oat")}


def valid(framework: Framework) -> set[str]:
    """Return the releases whose outcomes are valid."""
    results, suite = SUITES[framework]
    return recorded.recorded(framework, REPO / f"tests/expected/{results}.json", REPO / f"tests/conformance/{suite}")


@pytest.mark.parametrize("framework", SUITES, ids=lambda framework: framework.name)
def test_outcomes_of_every_release_are_valid(framework):
    assert valid(framework) == set(recorded.load_releases(framework=framework)), "make test-releases test-oat"


def test_changed_stack_runs_its_release_again(monkeypatch):
    load = recorded.load_stack
    changed = lambda release: replace(load(release), id="0" * 12) if release.name == "0.6.1" else load(release)
    monkeypatch.setattr(recorded, "load_stack", changed)
    assert set(recorded.load_releases(framework=VERL)) - valid(VERL) == {"0.6.1"}


def test_changed_test_code_runs_every_release_again(tmp_path):
    (tmp_path / "cases.py").write_text("one")
    release = recorded.load_releases()["0.6.1"]
    before = fingerprint(release, tmp_path)
    (tmp_path / "cases.py").write_text("two")
    assert fingerprint(release, tmp_path) != before


def test_newest_release_of_each_family_always_runs():
    assert representatives(VERL) == {"0.6.0", "0.7.1", "0.9.1"}
    assert representatives(OAT) == {"0.2.2", "0.2.4"}
