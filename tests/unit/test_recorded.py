"""``support.recorded``: recorded outcomes are valid for what they were taken from, and no longer."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support import recorded
from support.conformance import Behaviour, Suite
from support.engine_rows import upstream_outcomes
from support.recorded import RECORDINGS, Recording, UpstreamOutcomes
from support.selected import live_releases, mark
from support.trees import RELEASE, edit

from verl_precision.patch.releases import VERL, load_releases
from verl_precision.paths import REPO

HOOK = "fsdp-compute-in-the-configured-dtype.patch"


@pytest.mark.parametrize("framework", RECORDINGS, ids=lambda framework: framework.name)
def test_outcomes_of_every_release_are_valid(framework):
    recording, releases = RECORDINGS[framework], set(load_releases(framework=framework))
    assert recording.valid() == recording.upstream.valid() == releases, "outcomes are out of date: CONTRIBUTING.md"
    assert upstream_outcomes().valid() == {RELEASE}, "the engine's are out of date: CONTRIBUTING.md"


@pytest.fixture
def recording(tmp_path) -> Recording:
    """A folder of test code, with the recorded outcomes of all releases beside it."""
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "cases.py").write_text("one")
    made = Recording(VERL, suite, tmp_path / "results.json")
    made.results.write_text(json.dumps({name: {"fingerprint": made.fingerprint(name)} for name in load_releases()}))
    return made


def item(recording: Recording, fixture: str, **params: str) -> SimpleNamespace:
    """Return a test of the folder as pytest collects it, which takes this fixture."""
    file, callspec = recording.suite / "test_it.py", SimpleNamespace(params=params)
    return SimpleNamespace(path=file, fixturenames=[fixture], callspec=callspec, add_marker=Mock())


def marks(recording: Recording, fixture: str) -> dict[str, str]:
    """Return the marks of the releases whose tests, which take this fixture, `make test` leaves out."""
    items = {name: item(recording, fixture, release=name) for name in load_releases()}
    mark(recording, items.values())
    return {name: each.add_marker.call_args[0][0] for name, each in items.items() if each.add_marker.called}


def test_changed_hook_runs_its_release_again_and_changed_test_code_all(recording, tmp_path, monkeypatch):
    releases, others = load_releases().keys(), load_releases().keys() - {RELEASE}
    for folder in ("patches/verl", "configs/precision"):
        shutil.copytree(REPO / folder, tmp_path / folder)
    monkeypatch.setattr(recorded, "load_stack", partial(recorded.load_stack, project=tmp_path))
    assert marks(recording, "outcomes") == dict.fromkeys(releases, "recorded")
    assert marks(recording, "observed") == dict.fromkeys(others, "slow"), "the doctor's outcomes are not recorded"
    (hook,) = (tmp_path / "patches/verl/v0.6.1").glob(f"*{HOOK}")
    edit(hook, "Precision.of_worker(", "Precision.of_worker( ")
    assert live_releases(recording) == {RELEASE, "0.6.1"}
    assert marks(recording, "outcomes").keys() == releases - {"0.6.1"}
    assert marks(recording, "observed").keys() == others - {"0.6.1"}
    (recording.suite / "cases.py").rename(recording.suite / "renamed.py")
    assert live_releases(recording) == set(load_releases())


@pytest.mark.parametrize("changed", ["cases.py", "more_cases.py", "all.lock", "cpu.torch"])
def test_upstream_outcomes_are_valid_for_the_test_code_alone(recording, monkeypatch, changed):
    """A changed stack keeps them; a changed, new or locked file does not."""
    for pinned in ("all.lock", "cpu.torch"):
        (recording.suite / pinned).write_text("one")

    def upstream() -> UpstreamOutcomes:
        return replace(recording).upstream  # read anew

    upstream().write("0.6.1", {"dtype": "bfloat16"})
    upstream().write("0.7.1", {"dtype": "bfloat16"})
    upstream().write("0.7.1", {"scale": [1, float("inf")]})
    monkeypatch.setattr(recorded, "load_stack", lambda release: SimpleNamespace(id="0" * 12))
    assert upstream().of("0.6.1") == {"dtype": "bfloat16"}
    assert upstream().of("0.7.1") == {"dtype": "bfloat16", "scale": [1, float("inf")]}
    assert upstream().of("0.9.1") == {} and upstream().valid() == {"0.6.1", "0.7.1"}
    (recording.suite / changed).write_text("two")
    assert upstream().valid() == set()
    upstream().write("0.7.1", {"growth": None})
    assert upstream().of("0.7.1") == {"growth": None}


def test_processes_that_record_at_once_keep_each_others_outcomes(recording):
    """Each has read the file before the other wrote it."""
    first, second = (replace(recording).upstream for _ in range(2))
    first.write("0.6.1", {"dtype": "bfloat16"})
    second.write("0.6.1", {"scale": 1})
    assert replace(recording).upstream.of("0.6.1") == {"dtype": "bfloat16", "scale": 1}


@pytest.fixture
def suite(recording) -> Suite:
    """A suite of two cases, of which 0.6.1 cannot have the second."""
    dtype = Behaviour("a row", "float16", {"bfloat16": ("0.6.1",)})
    return Suite(recording, {"dtype": dtype, "reward": Behaviour("another row", "", {}, {"no worker": ("0.6.1",)})})


def run_suite(suite: Suite, outcomes: dict[bool, dict[str, str]], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Take the outcomes of 0.6.1, by whether it is patched, in a session that records them."""
    tests = [item(suite.recording, "outcomes", case=case) for case in suite.behaviours]
    config = SimpleNamespace(getoption={"write_results": True}.get)
    request = SimpleNamespace(session=SimpleNamespace(items=tests), config=config)
    session = suite.outcomes(request, lambda release, patched, *cases: outcomes[patched])
    of = next(session)
    of("0.6.1", True), of("0.6.1", False)
    meanwhile()
    assert next(session, None) is None


EXPECTED = {True: {"dtype": "float16"}, False: {"dtype": "bfloat16"}}


@pytest.mark.parametrize(
    "outcomes",
    [
        EXPECTED | {True: {"dtype": "bfloat16"}},
        EXPECTED | {False: {"dtype": "float32"}},
        EXPECTED | {True: {"dtype": "float16", "reward": ""}},
        EXPECTED | {False: {"dtype": "bfloat16", "reward": ""}},
    ],
)
def test_unexpected_outcome_removes_the_release(suite, outcomes):
    run_suite(suite, EXPECTED)
    assert suite.recording.valid() == set(load_releases())
    assert json.loads(suite.recording.results.read_text())["0.6.1"]["seen"]["dtype"]["upstream"] == "bfloat16"
    assert replace(suite.recording).upstream.of("0.6.1") == {"dtype": "bfloat16"}
    run_suite(suite, outcomes)
    assert suite.recording.valid() == load_releases().keys() - {"0.6.1"}
    assert replace(suite.recording).upstream.of("0.6.1") == {}


def test_files_that_change_during_the_run_are_an_error(suite):
    with pytest.raises(AssertionError, match="0.6.1: files changed while it ran"):
        run_suite(suite, EXPECTED, meanwhile=lambda: (suite.recording.suite / "cases.py").write_text("two"))
