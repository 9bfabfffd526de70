"""Read, edit and compare the folders and git trees of tests."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from verl_precision.files import write
from verl_precision.patch.apply import apply
from verl_precision.patch.releases import VERL, Framework, find_release
from verl_precision.patch.stack import release_stacks
from verl_precision.patch.wheels import unpacked_wheel

RELEASE = "0.9.1"  # of verl, which most tests run


def contents(root: Path) -> dict[str, bytes | None]:
    """Return the bytes of every file below ``root`` by path, None for a folder."""
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def patched_tree(
    release: str, folder: Path, given: Path | None, framework: Framework = VERL, fixes: bool = True
) -> Path:
    """Return a patched tree of a release, with the series ``fixes`` or without: ``given``, an option of pytest, if its
    stamp names the release, and not the release's other stack; else a new one in ``folder``."""
    if given:
        stamp = json.loads((given / framework.stamp).read_text())
        stacks = release_stacks(find_release(release, framework=framework))
        others = stacks[:-1] if fixes else stacks[1:]
        if stamp["release"] == release and stamp["stack"] not in [other.id for other in others]:
            return given
    tree = unpacked_wheel(release, folder, framework)
    apply(tree, framework=framework, fixes=fixes)
    return tree


def edit(path: Path, old: str, new: str) -> None:
    """Replace the first ``old`` in a file, which must contain it."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def write_files(root: Path, files: Mapping[str, str]) -> None:
    """Write files, from texts by path, with their folders."""
    for path, text in files.items():
        write(root / path, text.encode())


def git(*args: str, cwd: Path) -> str:
    """Run git as a developer with an identity of their own and return its output."""
    identity = ["-c", "user.name=A Developer", "-c", "user.email=developer@example.org"]
    return subprocess.run(["git", *identity, *args], cwd=cwd, check=True, capture_output=True, text=True).stdout


def commit(repo: Path, message: str, *options: str) -> None:
    """Commit all changes of the files that git knows."""
    git("commit", "--quiet", "--all", f"--message={message}", *options, cwd=repo)


def make_repository(folder: Path) -> None:
    """Make the folder a git repository with one commit, of all its files, on the branch main."""
    git("init", "--quiet", "--initial-branch=main", cwd=folder)
    git("config", "user.name", "A Developer", cwd=folder)
    git("config", "user.email", "developer@example.org", cwd=folder)
    git("add", "--all", "--force", cwd=folder)
    commit(folder, "main")
