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
    if not old:  # the tree was patched before this was kept, or lost it
        return ["CHANGELOG.md lists the changes"]
    known = set(entries(old))
    added = [entry for entry in entries(new) if entry not in known]
    referring = [f"  {entry}" for entry in added if REFERENCE.search(entry)]
    lines = ["new keys and metrics:", *referring] if referring else []
    others = len(added) - len(referring)
    return [*lines, f"{'other ' * bool(lines)}new entries in CHANGELOG.md: {others}"] if others else lines
