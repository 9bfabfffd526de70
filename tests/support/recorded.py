"""Outcomes that are recorded in tests/expected: under what they are valid, and what need not run again."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from lib.patches.releases import VERL, Framework, Release, load_releases
from lib.patches.stack import load_stack
from lib.paths import REPO

# Fixtures that run a release's workers.
RUNNING = {"outcomes", "observed"}
# verl 0.6.0 has the workers of the next family; 0.5.0 is the newest with configs that are dictionaries.
UNTYPICAL = {"0.6.0"}
# Beside the suite's own folder: what workers run on, and what judges them.
BENEATH = (
    *("recipes/cpu", "recipes/oat_cpu", "recipes/arithmetic", "requirements"),
    *(f"tests/support/{name}.py" for name in ("recorded", "conformance", "forked_ranks")),
)


def fingerprint(release: Release, suite: Path, patched: bool = True) -> str:
    """Return the hash of all that a release's outcomes depend on: its wheel, the suite and the locks, and its stack if
    ``patched``."""
    stack = load_stack(release).id if patched else "unpatched"
    digest = hashlib.sha256(f"{release.wheel_sha256} {stack}".encode())
    for path in (suite, *(REPO / name for name in BENEATH)):
        files = (
            [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in (".py", ".lock"))
        )
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def representatives(framework: Framework) -> set[str]:
    """Return the newest release of each family, except those of ``UNTYPICAL``: they always run."""
    releases = load_releases(framework=framework)
    return set({release.family: name for name, release in releases.items() if name not in UNTYPICAL}.values())


def every_release(framework: Framework) -> list:
    """Return all releases as parameters of a test; `make test` runs the newest of each family."""
    newest = representatives(framework)
    return [
        pytest.param(name, marks=[] if name in newest else [pytest.mark.slow])
        for name in load_releases(framework=framework)
    ]


def recorded(framework: Framework, results: Path, suite: Path) -> set[str]:
    """Return the releases whose outcomes in the file ``results`` are valid for this checkout."""
    entries = json.loads(results.read_text())
    releases = load_releases(framework=framework)
    return {
        name
        for name, entry in entries.items()
        if name in releases and entry.get("fingerprint") == fingerprint(releases[name], suite)
    }


def mark_recorded(items: Iterable[pytest.Item], framework: Framework, results: Path, suite: Path) -> None:
    """Mark the tests that run workers whose outcomes are recorded, except for the newest release of each family."""
    skip = recorded(framework, results, suite) - representatives(framework)
    for item in items:
        if item.path.is_relative_to(suite) and RUNNING.intersection(item.fixturenames):
            if item.callspec.params["release"] in skip:
                item.add_marker("recorded")


class UpstreamOutcomes:
    """The outcomes of unpatched releases in a file, each valid for its wheel, the suite and the locks.

    Args:
        file: of JSON, which need not exist.
        suite: the folder of the code from which the outcomes are taken.
        live: the cases that are never recorded, because their outcomes depend on the machine.
    """

    def __init__(self, file: Path, suite: Path, live: Iterable[str], framework: Framework = VERL) -> None:
        self.file, self.suite, self.live = file, suite, frozenset(live)
        self.releases = load_releases(framework=framework)
        self.entries = json.loads(file.read_text()) if file.exists() else {}

    def of(self, release: str) -> dict[str, str]:
        """Return a release's recorded outcomes by case; none if they are not valid."""
        entry = self.entries.get(release, {})
        valid = entry.get("fingerprint") == fingerprint(self.releases[release], self.suite, patched=False)
        return entry["outcomes"] if valid else {}

    def write(self, outcomes: Mapping[str, Mapping[str, str]]) -> None:
        """Record the outcomes of some releases by case, and keep those of others."""
        for release, texts in outcomes.items():
            valid_under = fingerprint(self.releases[release], self.suite, patched=False)
            kept = {case: text for case, text in texts.items() if case not in self.live}
            self.entries[release] = {"fingerprint": valid_under, "outcomes": kept}
        ordered = {name: self.entries[name] for name in self.releases if name in self.entries}
        self.file.write_text(json.dumps(ordered, indent=1) + "\n")
