"""``support.upstream_outcomes``: outcomes are valid for what they were recorded from, and no longer."""

import pytest
from support.upstream_outcomes import UpstreamOutcomes, fingerprint

CHANGES = {
    "a case file": lambda folder: (folder / "cases.py").write_text("two"),
    "a new case file": lambda folder: (folder / "more_cases.py").write_text("one"),
    "a lock": lambda folder: (folder / "requirements/all.lock").write_text("two"),
}


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "requirements").mkdir()
    (tmp_path / "cases.py").write_text("one")
    (tmp_path / "requirements/all.lock").write_text("one")
    return tmp_path


def test_valid_outcomes_are_read(suite):
    file = suite / "outcomes.json"
    writer = UpstreamOutcomes(file, fingerprint("sha of a wheel", suite), write=True)
    writer.add("storm", [1, float("inf")])
    writer.add("growth", None)
    reader = UpstreamOutcomes(file, fingerprint("sha of a wheel", suite), write=False)
    assert reader.known == {"growth": None, "storm": [1, float("inf")]}
    assert reader.recorded("growth") and not reader.recorded("another case")
    reader.add("another case", 1)
    assert "another case" not in file.read_text(), "only --write-results may write"
    assert not UpstreamOutcomes(file, fingerprint("sha of a wheel", suite), write=True).recorded("storm")


@pytest.mark.parametrize("change", CHANGES)
def test_changed_test_code_or_lock_makes_every_case_run(suite, change):
    before = fingerprint("sha of a wheel", suite)
    UpstreamOutcomes(suite / "outcomes.json", before, write=True).add("storm", 1)
    CHANGES[change](suite)
    after = fingerprint("sha of a wheel", suite)
    assert not UpstreamOutcomes(suite / "outcomes.json", after, write=False).recorded("storm")


def test_another_wheel_makes_every_case_run(suite):
    UpstreamOutcomes(suite / "outcomes.json", fingerprint("one", suite), write=True).add("storm", 1)
    assert not UpstreamOutcomes(suite / "outcomes.json", fingerprint("two", suite), write=False).recorded("storm")
    assert fingerprint(suite / "cases.py") != fingerprint(suite / "requirements/all.lock", "another")
