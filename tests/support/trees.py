"""Read, edit and compare the folders and git trees of tests."""

import subprocess
from pathlib import Path


def contents(root: Path) -> dict[str, bytes | None]:
    """Return the bytes of every file below ``root`` by path, None for a folder."""
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def edit(path: Path, old: str, new: str) -> None:
    """Replace the first ``old`` in a file, which must contain it."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def git(*args: str, cwd: Path) -> str:
    """Run git as a developer with an identity of their own and return its output."""
    identity = ["-c", "user.name=A Developer", "-c", "user.email=developer@example.org"]
    return subprocess.run(["git", *identity, *args], cwd=cwd, check=True, capture_output=True, text=True).stdout
