"""Ids of git objects, and a stack as commits: checkout and export of the tiny stack."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.patch_tool import cut_short, message, refused, run_command
from support.small_projects import CONFIG, MODULE, PROTOCOL, RELEASE, UNTOUCHED, wheel_of
from support.trees import contents, edit, git, write_files

from verl_precision.errors import Refused
from verl_precision.files import replace_files
from verl_precision.patch.commits import export
from verl_precision.patch.git_objects import blob_id, package_blobs, package_tree_id
from verl_precision.patch.releases import VERL
from verl_precision.patch.status import status
from verl_precision.patch.wheels import unpack

FILES = ("verl/__init__.py", "verl/a.py", "verl/a/b.py", "verl/a-b.py", "verl/a/c/d.yaml")


def test_ids_are_those_of_git(tmp_path: Path):
    """A folder sorts between two files; files of Python's and of apply's own do not count."""
    ignored = ("verl/a/__pycache__/b.cpython-311.pyc", "verl/c.pyc", VERL.stamp, f"{VERL.bookkeeping}/record.json")
    write_files(tmp_path, {path: path for path in (*FILES, *ignored)})
    git("init", "--quiet", cwd=tmp_path)
    git("add", *FILES, cwd=tmp_path)
    blobs = package_blobs(tmp_path)
    assert blobs == {path: git("hash-object", path, cwd=tmp_path).strip() for path in FILES}
    tree = git("write-tree", "--prefix=verl/", cwd=tmp_path).strip()
    assert package_tree_id(blobs) == tree
    assert blob_id(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"


@pytest.fixture
def tree(project: Path, tmp_path: Path) -> Path:
    """The tiny stack as commits."""
    assert run_command(project, "checkout", RELEASE, tmp_path / "tree").returncode == 0
    return tmp_path / "tree"


def test_export_of_a_checkout_changes_nothing(project: Path, tree: Path):
    before = contents(project)
    git("config", "diff.noprefix", "true", cwd=tree)
    subprocess.run([sys.executable, "-m", "compileall", "-q", tree / PROTOCOL], check=True)
    assert run_command(project, "export", tree).returncode == 0
    assert contents(project) == before


def test_git_configuration_of_the_user_is_not_read(tiny: Path, tmp_path: Path):
    (tmp_path / ".gitconfig").write_text("[commit]\n\tgpgsign = true\n[gpg]\n\tprogram = false\n")
    done = run_command(tiny, "checkout", RELEASE, tmp_path / "tree", env=os.environ | {"HOME": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    assert "not an empty folder" in refused(tiny, "checkout", RELEASE, tmp_path, unchanged=tmp_path)


def test_export_adds_a_patch_and_can_be_repeated(project: Path, tree: Path):
    edit(tree / UNTOUCHED, "import", "# hook\nimport")
    git("commit", "-am", message("[worker] feat: use another module"), cwd=tree)
    assert run_command(project, "export", tree).returncode == 0
    assert (project / "patches/verl/v0.9.1/series").read_text().splitlines()[2] == "worker-use-another-module.patch"
    written = contents(project)
    assert run_command(project, "export", tree).returncode == 0
    assert contents(project) == written
    assert run_command(project, "check", "--release", RELEASE).returncode == 0


def test_incomplete_header_is_refused(project: Path, tree: Path):
    edit(tree / UNTOUCHED, "import", "# hook\nimport")
    git("commit", "-am", "hook", cwd=tree)
    for text, named in {
        "read the dtype": "'read the dtype' needs a subject like",
        message("[fsdp] wip: read"): "'[fsdp] wip: read' needs a subject like",
        message("[fsdp] feat: read", Origin=None, Forwarded=None): "lacks the trailer Origin and Forwarded",
        message("[fsdp] feat: read", Origin=""): "lacks the trailer Origin",
        message("[fsdp] feat: read", Reason="none"): "Reason: none; allowed: backport, pending, local",
        message("[fsdp] fix: read the configured dtype"): "both become fsdp-read-the-configured-dtype",
        message("[fsdp] feat: read").replace("It exists", "---\nIt exists"): "lacks the trailer Reason",
    }.items():
        git("commit", "--amend", "-m", text, cwd=tree)
        assert named in refused(project, "export", tree, unchanged=project)


def test_export_requires_a_clean_linear_tree(project: Path, tree: Path, target: Path):
    refusal = partial(refused, project, "export", unchanged=project)

    def refusal_of_a_commit() -> str:
        """Return the refusal of all changes as a commit, which is dropped again."""
        git("add", "--all", cwd=tree)
        git("commit", "-m", message("[misc] feat: change"), cwd=tree)
        line = refusal(tree)
        git("reset", "--hard", "--quiet", "HEAD~1", cwd=tree)
        return line

    assert "is not a git tree made by checkout" in refusal(target)
    edit(tree / UNTOUCHED, "import", "# hook\nimport")
    assert f"uncommitted changes: {UNTOUCHED}" in refusal(tree)
    git("reset", "--hard", "--quiet", "base/0.9.1~1", cwd=tree)
    assert "on top of base/0.9.1" in refusal(tree)
    git("reset", "--hard", "--quiet", "ORIG_HEAD", cwd=tree)
    (tree / "setup.py").write_text("")
    assert "adds, removes or changes setup.py; a patch only changes files of the release" in refusal_of_a_commit()
    git("mv", UNTOUCHED, "verl/utils/moved.py", cwd=tree)
    assert f"adds, removes or changes {UNTOUCHED}; " in refusal_of_a_commit()
    (tree / MODULE).write_text("ANSWER = 43\n")
    assert f"changes {MODULE}; a patch only changes files of the release; new files are in patches/verl/files" in (
        refusal_of_a_commit()
    )
    edit(tree / CONFIG, "# Format", ">>>>>>> theirs\n# Format")
    assert "has a conflict marker, >>>>>>>;" in refusal_of_a_commit()
    git("checkout", "--quiet", "-b", "side", "HEAD~1", cwd=tree)
    git("commit", "--quiet", "--allow-empty", "-m", message("[misc] feat: stand beside"), cwd=tree)
    git("merge", "--quiet", "--no-edit", "stack", cwd=tree)
    assert "without merges" in refusal(tree)
    git("checkout", "--quiet", "stack", cwd=tree)
    git("-c", "sequence.editor=sed -i 1s/pick/edit/", "rebase", "--quiet", "--interactive", "base/0.9.1", cwd=tree)
    assert "has a rebase to finish: " in refusal(tree)


@pytest.mark.subprocess
@pytest.mark.parametrize("how", ["failed", "killed"])
def test_replaced_files_are_whole(tmp_path: Path, how: str):
    old, new = {"a.patch": "old", "b.patch": "old", "gone.patch": "old"}, {"a.patch": "new", "c.patch": "new"}
    states, cut = [], True
    while cut:
        home = tmp_path / str(len(states))
        write_files(home / "v1", old)
        change = {home / "v1" / name: new[name].encode() if name in new else None for name in (*new, "gone.patch")}
        cut = cut_short(home, lambda change=change, home=home: replace_files(change, home), len(states), how)
        found = {path: content.decode() for path, content in contents(home / "v1").items()}
        assert all(found.get(name) in (old.get(name), new.get(name)) for name in old | new)
        assert found["b.patch"] == "old"
        states.append(found == old)
        replace_files(change, home)
        assert contents(home / "v1") == {"a.patch": b"new", "b.patch": b"old", "c.patch": b"new"}
    written = 1 + len(new)  # a folder, and what is new
    assert len(states) > written and all(states[:written]) and not states[-1]


@pytest.mark.subprocess
def test_export_killed_at_any_change_is_completed_by_the_same_call(
    project: Path, tree: Path, target: Path, tmp_path: Path, monkeypatch
):
    """One patch becomes another, one is new and one is deleted."""
    archive = wheel_of(project, RELEASE)
    monkeypatch.setattr(
        "verl_precision.patch.commits.unpacked_wheel", lambda release, into, framework: unpack(archive, into)
    )
    git("reset", "--soft", "--quiet", "base/0.9.1", cwd=tree)
    git("commit", "-m", message("[cfg] fix: add a user's key (twice!)"), cwd=tree)
    edit(tree / UNTOUCHED, "import", "# hook\nimport")
    git("commit", "-am", message("[worker] feat: hook it"), cwd=tree)
    after = shutil.copytree(project, tmp_path / "after")
    export(shutil.copytree(tree, tmp_path / "tree-after"), after, remove=True)
    home, number, refusals = "patches/verl", 0, set()
    while cut_short(
        (copy := shutil.copytree(project, tmp_path / f"{number}")) / home,
        partial(export, again := shutil.copytree(tree, tmp_path / f"tree-{number}"), copy, remove=True),
        number,
        "killed",
    ):
        try:
            status(target, copy)
        except Refused as refusal:
            found = str(refusal)
            undo = f"git -C {copy / home}/v0.9.1 checkout . && git -C {copy / home}/v0.9.1 clean -f"
            assert found.endswith(f"; if an export was cut short, repeat it, or undo it: {undo}")
            refusals.add("does not start from" if "does not start from" in found else "disagree about")
        export(again, copy, remove=True)
        for left in (copy / home).glob(".new-*"):
            shutil.rmtree(left)
        assert contents(copy) == contents(after)
        number += 1
    assert refusals == {"does not start from", "disagree about"} and number > 10
