"""Find the entries of CHANGELOG.md on keys and metrics that are new since a tree was patched."""

import re
from pathlib import Path

REFERENCE = re.compile(r"reference/(keys|metrics)\.md")


def read_changelog(project: Path) -> str:
    """Return the project's changelog; empty where a copy of the project lacks it."""
    file = project / "CHANGELOG.md"
    return file.read_text() if file.exists() else ""


def entries(changelog: str) -> list[str]:
    """Return the entries of a changelog, each in one line."""
    return [" ".join(entry.split()) for entry in re.findall(r"^- (.*(?:\n +\S.*)*)", changelog, re.M)]


def changes(old: str, new: str) -> list[str]:
    """Return the entries of ``new`` that ``old`` lacks and that refer to keys or metrics, and the number of others."""
    known = set(entries(old))
    added = [entry for entry in entries(new) if entry not in known]
    told = [f"  {entry}" for entry in added if REFERENCE.search(entry)]
    others = len(added) - len(told)
    return [*told, f"  {others} other new entries in CHANGELOG.md"] if others else told
