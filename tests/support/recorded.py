"""Outcomes that are recorded in tests/expected: under what they are valid, and what need not run again."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lib.files import write_json
from lib.patches.releases import Framework, Release, load_releases
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


def fingerprint(*parts: str | Path) -> str:
    """Return the hash of texts, of files, and of the code and locks in folders."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode())
            continue
        inside = sorted(path for path in part.rglob("*") if path.suffix in (".py", ".lock"))
        for path in inside if part.is_dir() else [part]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def release_fingerprint(release: Release, suite: Path, patched: bool = True) -> str:
    """Return the hash of all that a release's outcomes depend on: its wheel, the suite and the locks, and its stack if
    ``patched``."""
    stack = load_stack(release).id if patched else "unpatched"
    return fingerprint(f"{release.wheel_sha256} {stack}", suite, *(REPO / name for name in BENEATH))


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
    return {
        name
        for name, release in load_releases(framework=framework).items()
        if entries.get(name, {}).get("fingerprint") == release_fingerprint(release, suite)
    }


def mark_recorded(items: Iterable[pytest.Item], framework: Framework, results: Path, suite: Path) -> None:
    """Mark the tests that run workers whose outcomes are recorded, except for the newest release of each family."""
    skip = recorded(framework, results, suite) - representatives(framework)
    for item in items:
        if item.path.is_relative_to(suite) and RUNNING.intersection(item.fixturenames):
            if item.callspec.params["release"] in skip:
                item.add_marker("recorded")


class UpstreamOutcomes:
    """The outcomes of cases on unpatched releases, in a file.

    Args:
        file: of JSON, which need not exist.
        valid_for: returns the fingerprint that a release's outcomes must have been recorded under.
    """

    def __init__(self, file: Path, valid_for: Callable[[str], str]) -> None:
        self.file, self.valid_for = file, valid_for
        self.entries = json.loads(file.read_text()) if file.exists() else {}

    def of(self, release: str) -> dict[str, Any]:
        """Return a release's recorded outcomes by case; none if they are not valid."""
        entry = self.entries.get(release, {})
        return entry["outcomes"] if entry.get("fingerprint") == self.valid_for(release) else {}

    def write(self, release: str, outcomes: Mapping[str, Any]) -> None:
        """Record outcomes of a release by case; valid ones of other cases and all other releases stay."""
        known = self.of(release) | outcomes
        self.entries[release] = {"fingerprint": self.valid_for(release), "outcomes": dict(sorted(known.items()))}
        write_json(self.file, dict(sorted(self.entries.items())))
