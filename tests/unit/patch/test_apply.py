"""Apply and unapply, on a few files of verl 0.9.1 with the tiny stack."""

import json
import os
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.patch_tool import AS_A_USER, cut_short, message, refused, run_command
from support.small_projects import CONFIG, ENGINE, MODULE, OVERLAY, PART, PROTOCOL, RELEASE, STAMP, UNTOUCHED
from support.trees import contents, edit, git, make_repository
from support.waiting import wait_until

from verl_precision.patch.apply import apply, unapply
from verl_precision.patch.git_objects import package_blobs, package_tree_id
from verl_precision.patch.stack import load_stacks
from verl_precision.patch.status import status
from verl_precision.patch.target import locked


def compile_files(*paths: Path) -> None:
    subprocess.run([sys.executable, "-m", "compileall", "-q", *paths], check=True)


def inodes(root: Path) -> dict[Path, tuple[int, int]]:
    """Return what changes of a file that is written, by its path."""
    return {path: (path.stat().st_ino, path.stat().st_ctime_ns) for path in root.rglob("*")}


def test_apply_hooks_copies_and_stamps_once(tiny: Path, pristine: Path, target: Path):
    (target / ENGINE).chmod(0o640)
    done = run_command(tiny, "apply", target)
    assert (done.returncode, done.stderr) == (0, "")
    assert (target / ENGINE).stat().st_mode & 0o777 == 0o640
    assert "verl 0.9.1: 3 files patched, 3 added, stack " in done.stdout
    assert "# twice\nimport verl.utils.precision\n" in (target / ENGINE).read_text()
    assert (target / MODULE).read_text() == "ANSWER = 42\n"
    expected = {"release": RELEASE, "stack": load_stacks(tiny)[0].id}
    expected["tree"] = package_tree_id(package_blobs(target))
    assert json.loads((target / STAMP).read_text()) == expected
    changed = package_blobs(target).items() - package_blobs(pristine).items()
    assert {path for path, _ in changed} == {ENGINE, CONFIG, PROTOCOL, MODULE, PART, OVERLAY}
    before = inodes(target)
    (line,) = apply(target, tiny)
    assert line.endswith("nothing to do") and inodes(target) == before


def test_unapply_restores_the_wheel_once(tiny: Path, pristine: Path, patched: Path):
    compile_files(*(patched / path for path in (MODULE, PART, PROTOCOL)))
    done = run_command(tiny, "unapply", patched)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 files restored, 3 deleted" in done.stdout
    assert contents(patched) == contents(pristine)
    for path in (ENGINE, CONFIG, PROTOCOL):
        old, new = (pristine / path).stat(), (patched / path).stat()
        assert (old.st_mode, old.st_mtime_ns) == (new.st_mode, new.st_mtime_ns)
    before = inodes(patched)
    (line,) = unapply(patched, tiny)
    assert line.endswith("nothing to do") and inodes(patched) == before
    compile_files(patched / PROTOCOL, patched / "verl/base_config.py")
    apply(patched, tiny)
    assert [path.name.split(".")[0] for path in (patched / "verl/__pycache__").iterdir()] == ["base_config"]


def test_apply_upgrades_an_older_stack(project: Path, pristine: Path, patched: Path, tmp_path: Path):
    (project / "patches/verl/files" / MODULE).write_text("ANSWER = 43\n")
    (project / "patches/verl/files" / PART).unlink()
    tree = tmp_path / "tree"
    assert run_command(project, "checkout", RELEASE, tree).returncode == 0
    edit(tree / UNTOUCHED, "import", "# one more file\nimport")
    git("commit", "-am", message("[worker] feat: one more file"), cwd=tree)
    git("revert", "--no-edit", "HEAD~1", cwd=tree)
    git("commit", "--amend", "-m", message("[cfg] fix: not the key"), cwd=tree)
    assert run_command(project, "export", "--remove", tree).returncode == 0
    assert status(patched, project).state == "outdated"
    assert "removed first" in apply(patched, project)[0]
    fresh = shutil.copytree(pristine, tmp_path / "fresh")
    apply(fresh, project)
    assert contents(patched) == contents(fresh)
    shutil.rmtree(project / "patches/verl/v0.9.1")  # unapply needs no stack
    shutil.rmtree(project / "patches/verl/files")
    unapply(patched, project)
    assert contents(patched) == contents(pristine)


def test_apply_works_inside_another_git_repository(tiny: Path, pristine: Path, tmp_path: Path):
    """The target is a relative path, of the package or a link."""
    git("init", "--quiet", cwd=tmp_path)
    (tmp_path / ".gitignore").write_text(".venv/\nscratch/\n")
    (tmp_path / "scratch").mkdir()
    target = shutil.copytree(pristine, tmp_path / ".venv/lib/site-packages")
    (tmp_path / "link").symlink_to(target)
    variables = {"GIT_DIR": str(tmp_path / ".git"), "GIT_WORK_TREE": str(tmp_path)}
    for name, more in ((".venv/lib/site-packages/verl", {}), ("link", variables)):
        inside = os.environ | {"TMPDIR": str(tmp_path / "scratch")} | more
        assert run_command(tiny, "apply", name, cwd=tmp_path, env=inside).returncode == 0
        assert "# twice" in (target / ENGINE).read_text()
        unapply(target, tiny)


def test_apply_and_unapply_work_on_a_git_checkout_with_other_files(tiny: Path, target: Path):
    (target / "verl/README.md").write_text("not in the wheel\n")
    (target / UNTOUCHED).write_text("mine = True\n")
    make_repository(target)
    found = status(target, tiny)
    assert (found.state, found.release, found.exact) == ("unpatched", RELEASE, False)
    other = "unpatched: verl 0.9.1; other files than these are not those of the wheel\n"
    assert run_command(tiny, "status", target).stdout == other
    apply(target, tiny)
    expected = {f" M {path}" for path in (ENGINE, CONFIG, PROTOCOL)} | {f"?? {path}" for path in (MODULE, STAMP)}
    expected |= {"?? verl/new_room/", f"?? {OVERLAY.rpartition('/')[0]}/"}
    assert set(git("status", "--porcelain", cwd=target).splitlines()) == expected
    unapply(target, tiny)
    assert git("status", "--porcelain", "--ignored", cwd=target) == ""


def waits_for_a_lock(process: subprocess.Popen) -> bool:
    """Return whether Linux lists the process, which must not have ended, among those that wait for a lock."""
    assert process.poll() is None
    return any(
        f" {process.pid} " in line for line in Path("/proc/locks").read_text().splitlines() if "-> FLOCK" in line
    )


def test_lock_serializes_concurrent_applies(tiny: Path, target: Path):
    before = contents(target)
    line = [sys.executable, "-B", tiny / "scripts/verl_precision", "apply", target]
    with locked(target):
        running = [subprocess.Popen(line, stdout=-1, stderr=-1, text=True) for _ in range(2)]
        for process in running:
            wait_until(partial(waits_for_a_lock, process), "the lock")
        assert contents(target) == before
    printed, waited = zip(*(process.communicate() for process in running), strict=True)
    assert set(waited) == {f"waiting for another command on {target}\n"}
    assert [process.returncode for process in running] == [0, 0]
    assert sorted("nothing to do" in text for text in printed) == [False, True]
    assert status(target, tiny).state == "patched"


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("apply", "verl"),
        ("apply", "verl/trainer/config"),
        ("unapply", "verl/new_room/inner"),
        ("apply", "verl/__pycache__"),
    ],
)
def test_read_only_folder_is_refused(tiny: Path, target: Path, command: str, folder: str):
    if command == "unapply":
        apply(target, tiny)
    compile_files(target / PROTOCOL)
    (target / folder).chmod(0o555)
    line = refused(tiny, command, target, unchanged=target, before=AS_A_USER)
    assert f"{target / folder} is read-only" in line
    assert run_command(tiny, "status", target, before=AS_A_USER).returncode == 0


def test_full_disk_changes_nothing(tiny: Path, target: Path):
    size = (target / PROTOCOL).stat().st_size - 1
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
    assert "File too large" in refused(tiny, "apply", target, unchanged=target, preexec_fn=limit)


def test_damaged_original_is_refused(tiny: Path, patched: Path):
    (kept,) = (patched / "verl/.precision").glob("*ppo_trainer.yaml.kept")
    edit(kept, "# Format", "# format")
    assert str(kept) in refused(tiny, "unapply", patched, unchanged=patched)


def copy(root: Path, to: Path) -> Path:
    """Copy a tree as hard links, which some installers create."""
    return shutil.copytree(root, to, copy_function=os.link)


@pytest.mark.subprocess
@pytest.mark.parametrize(("how", "start"), [("failed", "release"), ("interrupted", "release"), ("failed", "older")])
def test_failed_apply_is_rolled_back(tiny: Path, project: Path, pristine: Path, tmp_path: Path, how: str, start: str):
    """To what it started from or, once the older stack is removed, to the release."""
    (project / "patches/verl/files" / MODULE).write_text("ANSWER = 43\n")
    before = copy(pristine, tmp_path / "before")
    if start == "older":
        apply(before, tiny)
    found = []
    while cut_short(
        target := copy(before, tmp_path / f"{len(found)}"), lambda: apply(target, project), len(found), how
    ):
        found.append(contents(target))
    removed = found.index(contents(pristine))
    assert all(each == contents(before) for each in found[:removed])
    assert all(each == contents(pristine) for each in found[removed:])
    assert len(found) > 20


@pytest.mark.subprocess
def test_apply_killed_at_any_change_can_be_repaired(tiny: Path, project: Path, pristine: Path, tmp_path: Path):
    """An apply that first removes an older stack covers all changes of apply and unapply."""
    (project / "patches/verl/files" / MODULE).write_text("ANSWER = 43\n")
    older, newer = copy(pristine, tmp_path / "older"), copy(pristine, tmp_path / "newer")
    apply(older, tiny)
    apply(newer, project)
    states, number = set(), 0
    while cut_short(target := copy(older, tmp_path / f"{number}"), lambda: apply(target, project), number, "killed"):
        found = contents(target)
        states.add(status(target, project).state)
        assert contents(target) == found
        other = copy(target, tmp_path / f"{number}-other")
        unapply(other, project)
        assert contents(other) == contents(pristine)
        apply(target, project)
        assert contents(target) == contents(newer)
        number += 1
    assert contents(target) == contents(newer)
    assert number > 40
    assert states == {"outdated", "unpatched", "interrupted"}
