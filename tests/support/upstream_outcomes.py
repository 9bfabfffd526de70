"""Outcomes of cases on an unpatched tree, recorded under a fingerprint of all that they depend on."""

import hashlib
import json
from pathlib import Path
from typing import Any


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


class UpstreamOutcomes:
    """Read the outcomes in a file if its fingerprint is ``valid_for``, or record new ones.

    Args:
        file: JSON with a fingerprint, and outcomes by key.
        valid_for: the fingerprint of this checkout.
        write: whether every case runs and its outcome is recorded (``--write-results``).
    """

    def __init__(self, file: Path, valid_for: str, write: bool) -> None:
        self.file, self.valid_for, self.write = file, valid_for, write
        content = json.loads(file.read_text()) if file.exists() else {}
        self.known: dict[str, Any] = content["outcomes"] if content.get("fingerprint") == valid_for else {}

    def recorded(self, key: str) -> bool:
        """Return whether the outcome of ``key`` need not be found out again."""
        return not self.write and key in self.known

    def add(self, key: str, outcome: Any) -> None:
        """Record an outcome if that was asked for; those of other keys stay as long as the fingerprint is the same."""
        if self.write:
            self.known[key] = outcome
            content = {"fingerprint": self.valid_for, "outcomes": dict(sorted(self.known.items()))}
            self.file.write_text(json.dumps(content, indent=1) + "\n")
