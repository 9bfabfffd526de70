"""Outcomes that are recorded in tests/expected: under what they are valid, and which tests need not run again."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from lib.patches.releases import Framework, Release, load_releases
from lib.patches.stack import load_stack
from lib.paths import REPO

# Fixtures that run a release's workers.
RUNNING = {"outcomes", "observed"}
# Beside the suite's own folder: what workers run on.
BENEATH = ("recipes/cpu", "recipes/oat_cpu", "recipes/arithmetic", "tests/support/recorded.py", "requirements")


def fingerprint(release: Release, suite: Path) -> str:
    """Return the hash of all that a release's outcomes depend on: its wheel, its stack, the suite and the locks."""
    digest = hashlib.sha256(f"{release.wheel_sha256} {load_stack(release).id}".encode())
    for path in (suite, *(REPO / name for name in BENEATH)):
        files = (
            [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in (".py", ".lock"))
        )
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def representatives(framework: Framework) -> set[str]:
    """Return the newest release of each family, which always runs."""
    return set({release.family: name for name, release in load_releases(framework=framework).items()}.values())


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
