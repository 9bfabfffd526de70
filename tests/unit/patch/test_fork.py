"""Porting the tiny stack to a fork of verl that is a git checkout."""

import os
import shutil
from pathlib import Path

import pytest
from support.patch_tool import refused, run_command
from support.small_projects import CONFIG, ENGINE, PROTOCOL, UNTOUCHED
from support.trees import commit, edit, git, make_repository

from verl_precision.files import write
from verl_precision.patch.status import status

BRANCH = "precision/0.9.1"
STACK = ["[fsdp, worker] feat: read the configured dtype", "[cfg] fix: add a user's key (twice!)"]


@pytest.fixture(scope="module")
def built(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fork of 0.9.1: 20 commits to a file that no patch hooks, 5 to hooked files; read it, do not change it."""
    fork = shutil.copytree(pristine, tmp_path_factory.mktemp("fork") / "fork")
    make_repository(fork)
    for number in range(20):
        edit(fork / UNTOUCHED, "\n", f"\n# unrelated {number}\n")
        commit(fork, f"unrelated {number}")
    for number, path in enumerate([ENGINE, CONFIG, PROTOCOL, ENGINE, CONFIG]):
        (fork / path).write_text((fork / path).read_text() + f"# related {number}\n")
        commit(fork, f"related {number}")
    return fork


@pytest.fixture
def fork(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "fork")


def test_fork_gets_a_branch_with_one_commit_a_patch(tiny: Path, fork: Path, tmp_path: Path):
    step = f"check them out again, or keep them and merge the patches: make port FROM=0.9.1 TO={fork}\n"
    assert refused(tiny, "apply", fork, unchanged=fork).endswith(step)
    tree = tmp_path / "tree"
    (fork / "verl/own.py").write_text("")
    done = run_command(tiny, "port", "0.9.1", fork, tree)
    assert done.returncode == 0 and git("branch", "--list", BRANCH, cwd=fork) == ""
    command = next(line for line in done.stdout.splitlines() if "push origin" in line).partition(": git -C ")[2]
    git("-C", *command.split(), cwd=tmp_path)
    git("checkout", "--quiet", BRANCH, cwd=fork)
    assert git("log", "--format=%s", "-2", cwd=fork).splitlines() == STACK[::-1]
    assert git("rev-parse", "HEAD~3", cwd=fork) == git("rev-parse", "main", cwd=fork)
    assert set(git("log", "--format=%cI", "-3", cwd=fork).split()) == {
        git("log", "-1", "--format=%cI", "main", cwd=fork).strip()
    }
    # The fork moves on, and the stack with it.
    git("checkout", "--quiet", "main", cwd=fork)
    edit(fork / UNTOUCHED, "\n", "\n# later\n")
    commit(fork, "later")
    git("rebase", "--quiet", "main", BRANCH, cwd=fork)
    assert git("log", "--format=%s", "-2", cwd=fork).splitlines() == STACK[::-1]
    assert run_command(tiny, "status", fork).returncode == 0
    assert "contains verl/new_room/inner/part.py already" in refused(
        tiny, "port", "0.9.1", fork, tmp_path / "again", unchanged=fork
    )


def test_ported_fork_is_known(tiny: Path, project: Path, fork: Path, tmp_path: Path):
    tree = tmp_path / "tree"
    run_command(tiny, "port", "0.9.1", fork, tree)
    state = status(tree, tiny)
    assert state.state == "ported" and state.detail.startswith("the patches of verl 0.9.1, or ones close to them, are")
    copy = shutil.copytree(tree, tmp_path / "image", ignore=shutil.ignore_patterns(".git"))
    assert status(copy, tiny) == state
    for command in ("apply", "unapply"):
        assert "are commits; to remove them, switch branches" in refused(tiny, command, tree, unchanged=tree)
    (tree / ".git/sequencer").mkdir()
    assert status(tree, tiny).detail.endswith(f"and a cherry-pick is to finish: git -C {tree} cherry-pick --continue")
    (tree / ".git/sequencer").rmdir()
    edit(project / "patches/verl/v0.9.1/cfg-add-a-users-key-twice.patch", "It exists", "It existed")  # a later version
    write(project / "patches/verl/files/verl/utils/another.py", b"")
    assert status(tree, project).state == "ported"


def test_line_endings_of_the_work_tree_do_not_count(tiny: Path, fork: Path, tmp_path: Path):
    (fork / ".gitattributes").write_text("*.py text eol=crlf\n")
    git("add", ".gitattributes", cwd=fork)
    commit(fork, "Windows")
    done = run_command(tiny, "port", "0.9.1", fork, tmp_path / "tree")
    assert done.returncode == 0 and "conflict" not in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_checkout_of_another_user_is_refused(tiny: Path, fork: Path, tmp_path: Path):
    os.chown(fork, 1234, 1234)
    line = refused(tiny, "port", "0.9.1", fork, tmp_path / "tree", unchanged=tmp_path)
    assert f"{fork} is a git checkout without a commit, or another user's: fatal: detected dubious ownership" in line


def test_uncommitted_changes_and_an_unborn_branch_are_refused(tiny: Path, fork: Path, tmp_path: Path):
    (fork / "notes").write_text("untracked files may stay\n")
    edit(fork / UNTOUCHED, "\n", "\n# begun\n")
    line = refused(tiny, "port", "0.9.1", fork, tmp_path / "tree", unchanged=tmp_path)
    assert f"{fork} has uncommitted changes: {UNTOUCHED}; commit or stash them" in line
    shutil.rmtree(fork / ".git")
    git("init", "--quiet", cwd=fork)
    assert "without a commit" in refused(tiny, "port", "0.9.1", fork, tmp_path / "tree", unchanged=tmp_path)
