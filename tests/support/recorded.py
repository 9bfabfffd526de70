"""Outcomes that are recorded in tests/expected: under what they are valid, and what need not run again."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from verl_precision.files import write_json
from verl_precision.patch.releases import OAT, VERL, Framework, load_releases
from verl_precision.patch.stack import load_stack
from verl_precision.paths import REPO

# Beside a suite's own folder: what workers run on, what starts them, and what judges them.
SUPPORT = ("conformance", "fork_server", "forked_ranks", "oat_server", "parsed_once", "recorded", "trees", "waiting")
BENEATH = (
    *(REPO / name for name in ("recipes/cpu", "recipes/oat_cpu", "recipes/arithmetic", "requirements")),
    *(REPO / f"tests/support/{name}.py" for name in SUPPORT),
)


def hashed(folder: Path) -> list[Path]:
    """Return the code and pinned packages in a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".lock", ".torch"))


def fingerprint(*parts: str | Path) -> str:
    """Return the hash of texts, of files and of the code and pinned packages in folders, with the files' names."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode())
            continue
        for path in hashed(part) if part.is_dir() else [part]:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(part.parent)} {len(content)}".encode() + content)
    return digest.hexdigest()[:16]


def read_entries(file: Path) -> dict[str, Any]:
    """Return the entries of a file of recorded outcomes, by release; none if there is no file."""
    return json.loads(file.read_text()) if file.exists() else {}


@contextmanager
def changed_entries(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a file, by release, and write them back sorted; other processes wait meanwhile."""
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # released when the last descriptor is closed
        entries = read_entries(file)
        yield entries
        write_json(file, dict(sorted(entries.items())))
    finally:
        os.close(folder)


class UpstreamOutcomes:
    """The outcomes of cases on unpatched releases, in a file.

    Args:
        file: of JSON, which need not exist.
        valid_for: returns the fingerprint that a release's outcomes must have been recorded under.
    """

    def __init__(self, file: Path, valid_for: Callable[[str], str]) -> None:
        self.file, self.valid_for = file, valid_for
        self.entries = read_entries(file)

    def is_valid(self, release: str) -> bool:
        """Return whether a release has outcomes, and these are valid for this checkout."""
        return release in self.entries and self.entries[release]["fingerprint"] == self.valid_for(release)

    def valid(self) -> set[str]:
        """Return the releases whose outcomes are valid for this checkout."""
        return set(filter(self.is_valid, self.entries))

    def of(self, release: str) -> dict[str, Any]:
        """Return a release's recorded outcomes by case; none if they are not valid."""
        return self.entries[release]["outcomes"] if self.is_valid(release) else {}

    def write(self, release: str, outcomes: Mapping[str, Any]) -> None:
        """Record outcomes of a release by case; valid ones of other cases and all other releases stay."""
        with changed_entries(self.file) as self.entries:
            known = self.of(release) | outcomes
            self.entries[release] = {"fingerprint": self.valid_for(release), "outcomes": dict(sorted(known.items()))}

    def remove(self, release: str) -> None:
        """Remove a release's outcomes, if there are any."""
        with changed_entries(self.file) as self.entries:
            self.entries.pop(release, None)


@dataclass(frozen=True)
class Recording:
    """The recorded outcomes of a framework's releases.

    Args:
        suite: the folder of the conformance suite.
        results: the file with the verdicts on patched releases; outcomes of unpatched ones: ``NAME-upstream.json``.
    """

    framework: Framework
    suite: Path
    results: Path

    def fingerprint(self, release: str, patched: bool = True) -> str:
        """Return the hash of all that a release's outcomes depend on: its entry in versions.toml, with the wheel, the
        suite and what is beneath, and its stack if ``patched``."""
        entry = load_releases(framework=self.framework)[release]
        wheel = f"{entry.wheel_sha256} {entry.family} {entry.features}"
        cases = [file for file in hashed(self.suite) if "doctor" not in file.name]  # those are not recorded
        return fingerprint(f"{wheel} {load_stack(entry).id if patched else 'unpatched'}", *cases, *BENEATH)

    @cached_property
    def upstream(self) -> UpstreamOutcomes:
        """The outcomes of unpatched releases, without digests: these depend on the CPU."""
        file = self.results.with_stem(f"{self.results.stem}-upstream")
        return UpstreamOutcomes(file, partial(self.fingerprint, patched=False))

    def valid(self) -> set[str]:
        """Return the releases whose results are valid for this checkout."""
        entries = json.loads(self.results.read_text())
        releases = load_releases(framework=self.framework)
        return {name for name in releases if entries.get(name, {}).get("fingerprint") == self.fingerprint(name)}


RECORDINGS = {
    VERL: Recording(VERL, REPO / "tests/conformance/verl", REPO / "tests/expected/releases.json"),
    OAT: Recording(OAT, REPO / "tests/conformance/oat", REPO / "tests/expected/oat.json"),
}
