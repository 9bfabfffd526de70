"""Run git, independent of the caller's configuration, repository and clock."""

import os
import subprocess
from pathlib import Path

from verl_precision.errors import Refused

# The caller's git setup must not change a result: no configuration, no surrounding repository (inside one,
# `git apply` skips files and exits 0), no clock.
DATE = "2000-01-01T00:00:00Z"

# The file or folder of .git that an unfinished command leaves.
UNFINISHED = {"cherry-pick": "sequencer", "rebase": "rebase-merge"}


def git(*args: str, cwd: Path, stdin: str = "", date: str = DATE) -> str:
    """Run git in ``cwd`` and return its output; if it fails, raise Refused with the first line of its complaint.

    ``date`` is that of the commits that it makes.
    """
    done = run_git(*args, cwd=cwd, stdin=stdin, date=date)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise Refused(f"git {args[0]} failed with exit code {done.returncode}: {reason}")
    return done.stdout.decode(errors="backslashreplace")


def unmerged(tree: Path) -> list[str]:
    """Return the files of a git tree that have conflicts to resolve."""
    return git("diff", "--name-only", "--diff-filter=U", cwd=tree).split()


def cherry_pick(commits: str, tree: Path, date: str = DATE) -> bool:
    """Cherry-pick a range of commits up to the first conflict, and return whether there is none."""
    done = run_git("cherry-pick", "--keep-redundant-commits", commits, cwd=tree, date=date)
    if done.returncode and not unmerged(tree):
        raise Refused(f"git cherry-pick failed: {done.stderr.decode().strip()}")
    return not done.returncode


def read_blob(name: str, cwd: Path) -> bytes:
    """Return the content of a file by its blob id or as ``<commit>:<path>``."""
    done = run_git("cat-file", "blob", name, cwd=cwd)
    if done.returncode:
        raise Refused(f"git has no file {name} in {cwd}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def unfinished(tree: Path) -> str | None:
    """Return the unfinished command of a git tree, cherry-pick or rebase; None if there is none."""
    return next((command for command, state in UNFINISHED.items() if (tree / ".git" / state).exists()), None)


def run_git(*args: str, cwd: Path, stdin: str = "", date: str = DATE) -> subprocess.CompletedProcess[bytes]:
    """Run git in ``cwd`` and return the finished process, whatever its exit code."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    identity = {"NAME": "verl-precision", "EMAIL": "", "DATE": date}
    env |= {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in identity.items()}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    env["GIT_CEILING_DIRECTORIES"] = str(cwd.resolve().parent)
    try:
        return subprocess.run(["git", *args], cwd=cwd, env=env, input=stdin.encode(), capture_output=True)
    except OSError as error:  # not only FileNotFoundError: PATH may name a file
        if error.filename != "git":  # the folder is missing
            raise
        raise Refused("git is not installed: install it, or add its folder to PATH") from None
