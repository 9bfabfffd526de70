"""Trees that others touched: other owners and modes, links and pipes, a lost record, an uninstalled verl."""

import compileall
import errno
import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.patch_tool import refused, run_command
from support.small_projects import CONFIG, ENGINE, MODULE, OVERLAY, PART, PROTOCOL, RELEASE, STAMP, UNTOUCHED
from support.trees import contents, edit, git, write_files

from verl_precision.errors import Refused
from verl_precision.patch.apply import apply, unapply
from verl_precision.patch.git_objects import blob_id
from verl_precision.patch.open_tree import OpenTree
from verl_precision.patch.releases import VERL, find_release
from verl_precision.patch.stack import load_stack
from verl_precision.patch.status import status
from verl_precision.patch.target import locked
from verl_precision.patch.wheels import unpacked_wheel

RECORD = "verl/.precision/record.json"
KEPT = "verl/.precision/old+mine"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


def test_copied_files_have_the_modes_of_the_tree(tiny: Path, target: Path):
    for path in (target / "verl", *(target / "verl").rglob("*")):
        path.chmod(0o775 if path.is_dir() else 0o664)
    assert run_command(tiny, "apply", target, umask=0o077).returncode == 0
    modes = {path.stat().st_mode & 0o777 for path in (target / "verl").rglob("*")}
    assert modes == {0o775, 0o664}


@needs_root
def test_what_root_writes_belongs_to_the_owner_of_the_tree(tiny: Path, target: Path):
    for path in (target, *target.rglob("*")):
        os.chown(path, 1234, 1235)
    for command in (apply, unapply):
        command(target, tiny)
        assert {(path.stat().st_uid, path.stat().st_gid) for path in target.rglob("*")} == {(1234, 1235)}


@pytest.mark.parametrize("relative", [False, True])
def test_tree_of_links_stays_one(tiny: Path, pristine: Path, tmp_path: Path, relative: bool):
    target = tmp_path / "links"
    for file in (path for path in pristine.rglob("*") if path.is_file()):
        link = target / file.relative_to(pristine)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(file, link.parent) if relative else file)
    before = {path: os.readlink(path) for path in target.rglob("*") if path.is_symlink()}
    apply(target, tiny)
    assert status(target, tiny).state == "patched" and not (target / ENGINE).is_symlink()
    unapply(target, tiny)
    assert {path: os.readlink(path) for path in target.rglob("*") if not path.is_dir()} == before


def test_what_is_no_file_is_ignored(tiny: Path, target: Path):
    (target / "verl/.#lock").symlink_to("nowhere")
    os.mkfifo(target / "verl/pipe")
    assert run_command(tiny, "apply", target, timeout=60).returncode == 0
    assert status(target, tiny).state == "patched"
    unapply(target, tiny)
    assert (target / "verl/.#lock").is_symlink()


@pytest.mark.parametrize("path", [MODULE, STAMP, f"{PART}/folder", "verl/new_room", "verl/.precision", KEPT])
def test_what_is_in_the_way_is_refused_first(tiny: Path, target: Path, path: str):
    blocked = target / path
    if path == KEPT:  # has the name of a file of apply
        write_files(target, {path: "mine\n", "verl/.precision/.gitignore": "*\n"})
    elif path in ("verl/new_room", "verl/.precision"):
        blocked.symlink_to("utils" if path == "verl/.precision" else "nowhere")
    else:
        blocked.mkdir(parents=True)
    line = refused(tiny, "apply", target, unchanged=target)
    assert "is in the way" in line and str(blocked.parent if path.startswith((PART, KEPT)) else blocked) in line
    unapply(target, tiny)
    assert os.path.lexists(blocked)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""), ("", "[" * 100_000), ("", '{"release": "0.9'), ("", "[]"), ("", '{"release": "0.9.1", "more": 1}'),
        ('"replaced": {', '"replaced": [], "x": {'), ('"folders": [', '"folders": [1, '),
        ('"replaced": {', '"replaced": {"a": null, '), ('"added": {', '"added": {"a": ["x"], '),
        ('"added": {', '"added": {"verl/a.py": "0123", '), ('"tree": "', '"tree": "x'),
    ],
)  # fmt: skip
def test_damaged_record_is_refused_with_the_way_out(tiny: Path, pristine: Path, patched: Path, old: str, new: str):
    record = patched / RECORD
    record.write_text(record.read_text().replace(old, new) if old else new)
    for command in ("status", "apply", "unapply"):
        line = refused(tiny, command, patched, unchanged=patched)
        assert (
            f"{record} is damaged, or of a newer version" in line
            and f"save your edits, delete {patched}/verl and" in line
        )


@pytest.mark.parametrize("kind", ["replaced", "added", "folders"])
@pytest.mark.parametrize(
    "outside",
    ["../victim", "{root}/victim", "verl/../../victim", "verl/./../victim", "victim", "verl/.precision/x", ""],
)
def test_record_of_files_elsewhere_is_refused(tiny: Path, patched: Path, kind: str, outside: str):
    """Such as in a repository that was cloned; unapply would overwrite or delete the file."""
    path = outside.format(root=patched.parent)
    write_files(patched.parent, {"victim": "mine\n", "target/victim": "mine\n"})
    (patched / "verl/.precision" / f"old+{path.replace('/', '+')}").write_text("theirs\n")
    record = json.loads((patched / RECORD).read_text())
    entries = {"replaced": {path: [blob_id(b"theirs\n"), blob_id(b"mine\n")]}, "added": {path: blob_id(b"mine\n")}}
    record[kind] = record[kind] + [path] if kind == "folders" else record[kind] | entries[kind]
    (patched / RECORD).write_text(json.dumps(record))
    before = contents(patched.parent)
    for command in (status, apply, unapply):
        with pytest.raises(Refused, match=re.escape(f"({path!r} is not inside verl/)")):
            command(patched, tiny)
    assert contents(patched.parent) == before


def test_lost_record_is_refused_with_the_way_out(tiny: Path, patched: Path):
    stack = json.loads((patched / STAMP).read_text())["stack"]
    shutil.rmtree(patched / "verl/.precision")
    edit(patched / ENGINE, "\n", "\n# mine\n")
    without = f"without the record in verl/.precision; save your edits, delete {patched}/verl and reinstall verl"
    for command in ("apply", "unapply"):
        assert f"half-patched: verl 0.9.1 with stack {stack}, but {without}" in refused(
            tiny, command, patched, unchanged=patched
        )
    for path in (STAMP, MODULE, PART, OVERLAY):  # as by git clean
        (patched / path).unlink()
    line = refused(tiny, "apply", patched, unchanged=patched)
    assert f"dirty: verl 0.9.1 except {ENGINE}; save your edits, then reinstall verl 0.9.1" in line
    edit(patched / ENGINE, "# mine\n", "")
    assert f"dirty: verl 0.9.1 except {ENGINE}" in refused(tiny, "unapply", patched, unchanged=patched)


@pytest.mark.parametrize("state", ["unpatched", "patched"])
def test_file_with_the_name_of_the_stamp_is_refused(tiny: Path, target: Path, state: str):
    """Apply would replace it, and unapply delete it."""
    if state == "patched":
        apply(target, tiny)
    for text in ("", "{}", "[]", '{"release": ["x"], "stack": 1}'):
        (target / STAMP).write_text(text)
        with pytest.raises(Refused, match=f"{target / STAMP} is in the way: apply did not write it; move it away"):
            status(target, tiny)
    for command in ("apply", "unapply"):
        assert f"{target / STAMP} is in the way" in refused(tiny, command, target, unchanged=target)


def test_bookkeeping_is_on_the_disk_before_the_tree_changes(tiny: Path, target: Path, monkeypatch):
    synced, before = {}, contents(target)
    monkeypatch.setattr(
        os, "fsync", lambda opened: synced.update({Path(os.readlink(f"/proc/self/fd/{opened}")): contents(target)})
    )
    apply(target, tiny)
    *files, folder = synced
    during = synced[folder]
    assert {path: content for path, content in during.items() if ".precision.new" not in path} == before
    assert folder == target / "verl/.precision.new" and folder / "record.json" in files
    assert len(synced) == sum(".precision.new" in path for path in during)


def test_file_system_without_locks_and_fsync(tiny: Path, pristine: Path, target: Path, monkeypatch):
    def unsupported(number: int) -> Callable[..., None]:
        def call(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return call

    monkeypatch.setattr("fcntl.flock", unsupported(errno.ENOSYS))
    monkeypatch.setattr(os, "fsync", unsupported(errno.EINVAL))
    apply(target, tiny)
    assert status(target, tiny).state == "patched"
    monkeypatch.setattr(os, "fsync", unsupported(errno.EIO))
    unapply(target, tiny)
    with pytest.raises(OSError, match="Input/output error; nothing was changed: '.*/verl/.precision.new/"):
        apply(target, tiny)
    assert contents(target) == contents(pristine)


def test_status_does_not_wait_for_another_command(tiny: Path, target: Path):
    with locked(target):
        done = run_command(tiny, "status", target, timeout=60)
    assert done.stdout == "unpatched: verl 0.9.1\n"
    assert done.stderr == f"another command is changing {target}: this may be an intermediate state\n"


def test_compiled_originals_do_not_stay(tiny: Path, pristine: Path, patched: Path):
    """As pip and image builds compile whole site-packages folders."""
    assert compileall.compile_dir(patched, quiet=1)
    apply(patched, tiny)
    unapply(patched, tiny)
    assert {path for path in contents(patched) if "__pycache__" not in path} == set(contents(pristine))


def test_full_disk_leaves_nothing_in_the_way(tiny: Path, pristine: Path, target: Path, monkeypatch):
    def fail(tree: OpenTree, path: Path, *_: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left on device; nothing was changed"):
        full.setattr(OpenTree, "write", fail)
        apply(target, tiny)
    assert contents(target) == contents(pristine)


@needs_root
def test_file_that_not_even_root_can_change_is_refused_first(project: Path, patched: Path):
    (project / "patches/verl/files" / MODULE).write_text("ANSWER = 43\n")
    if subprocess.run(["chattr", "+i", patched / ENGINE], capture_output=True).returncode:
        pytest.skip("no immutable files here")
    try:
        for name in ("apply", "unapply"):
            line = refused(project, name, patched, unchanged=patched)
            assert f"{patched / ENGINE} cannot be changed, not even by root: see lsattr; nothing was changed" in line
    finally:
        subprocess.run(["chattr", "-i", patched / ENGINE], check=True)


@pytest.mark.parametrize("mine", [(), ("verl/mine.py",)])
def test_leftovers_of_pip_uninstall_are_cleared(tiny: Path, pristine: Path, patched: Path, mine: tuple[str, ...]):
    for path in [path for path in pristine.rglob("*") if path.is_file()]:
        (patched / path.relative_to(pristine)).unlink()
    for folder in sorted((path for path in patched.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    write_files(patched, dict.fromkeys(mine, "mine\n"))
    assert "half-patched: verl was uninstalled; make unapply" in refused(tiny, "apply", patched, unchanged=patched)
    assert run_command(tiny, "unapply", patched).returncode == 0
    assert [path for path in patched.rglob("*") if path.is_file()] == [patched / path for path in mine]
    assert (patched / "verl").exists() == bool(mine)


def test_edited_file_of_a_checkout_is_an_edit(tmp_path: Path):
    """Of a commit that other files tell from the release."""
    root = unpacked_wheel("0.9.0", tmp_path / "checkout")
    (root / "verl/version/version").write_text("0.10.0.dev0\n")
    (path, *_) = load_stack(find_release("0.9.0")).before
    content = (root / path).read_text()
    (root / path).write_text(f"{content}# mine\n")
    (root / UNTOUCHED).write_text("mine = True\n")
    assert str(status(root)).startswith(f"dirty: verl 0.9.0 except {path}; save your edits, then reinstall")


def test_forced_unapply_keeps_edits(tiny: Path, pristine: Path, patched: Path):
    for path in (ENGINE, MODULE):
        edit(patched / path, "\n", "\n# mine\n")
    edits = {path: (patched / path).read_bytes() for path in (ENGINE, MODULE)}
    write_files(patched, {f"{MODULE}.edited": "older\n"})
    assert f"{MODULE}.edited is in the way" in refused(tiny, "unapply", "--force", patched, unchanged=patched)
    (patched / f"{MODULE}.edited").unlink()
    assert "FORCE=yes restores verl 0.9.1 and keeps each as FILE.edited" in status(patched, tiny).detail
    done = run_command(tiny, "unapply", "--force", patched)
    assert done.stdout.count("edited file kept as ") == 2
    after = contents(patched)
    assert {path: after.pop(f"{path}.edited") for path in (ENGINE, MODULE)} == edits
    assert after == contents(pristine)


@pytest.mark.parametrize("edited", [(ENGINE, CONFIG, PROTOCOL), (ENGINE,)])
def test_edits_are_known_where_no_file_is_as_patched(
    tiny: Path, pristine: Path, patched: Path, edited: tuple[str, ...]
):
    """The others were restored by hand."""
    for path in (ENGINE, CONFIG, PROTOCOL):
        if path in edited:
            edit(patched / path, "\n", "\n# mine\n")
        else:
            shutil.copy(pristine / path, patched / path)
    edits = {f"{path}.edited": (patched / path).read_bytes() for path in edited}
    assert "dirty: edited after apply: " in refused(tiny, "unapply", patched, unchanged=patched)
    unapply(patched, tiny, force=True)
    assert contents(patched) == contents(pristine) | edits


def test_files_of_another_version_are_not_edits(tiny: Path, pristine: Path, patched: Path):
    """One that is not listed, as pip installs it over a patched tree."""
    newer = {VERL.version_file: "9.9\n", **dict.fromkeys((ENGINE, CONFIG), "newer\n")}
    write_files(patched, newer)
    (patched / PROTOCOL).unlink()
    unapply(patched, tiny)
    expected = {path: text.encode() for path, text in newer.items()}
    after = contents(pristine) | expected
    assert contents(patched) == {path: content for path, content in after.items() if path != PROTOCOL}


def test_failed_upgrade_reports_what_is_left(project: Path, pristine: Path, patched: Path, monkeypatch):
    def fail(target) -> None:
        raise OSError(28, "No space left on device", "file", None, "other")

    (project / "patches/verl/files" / MODULE).write_text("ANSWER = 43\n")
    monkeypatch.setattr("verl_precision.patch.apply.commit_staged", fail)
    with pytest.raises(OSError, match="device; rolled back to the unpatched verl 0.9.1: 'file' -> 'other'"):
        apply(patched, project)
    assert contents(patched) == contents(pristine)


def test_removed_files_and_a_reinstalled_verl_are_told_apart(tiny: Path, pristine: Path, patched: Path):
    shutil.rmtree(patched / "verl/workers")
    assert f"dirty: removed after apply: {ENGINE}; make unapply-patches" in str(status(patched, tiny))
    unapply(patched, tiny)
    assert contents(patched) == contents(pristine)
    apply(patched, tiny)
    shutil.copytree(pristine, patched, dirs_exist_ok=True)
    assert "verl was installed or checked out again over stack" in status(patched, tiny).detail
    apply(patched, tiny)
    assert status(patched, tiny).state == "patched"


def test_upgrade_fails_whole_on_a_full_disk(project: Path, pristine: Path, patched: Path):
    size = (patched / PROTOCOL).stat().st_size * 2
    (project / "patches/verl/files" / MODULE).write_text("\n" * size * 2)
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
    line = refused(project, "apply", patched, unchanged=patched, preexec_fn=limit)
    assert re.search(r"/verl/\.precision\.new/\S+: File too large; nothing was changed\n", line)
    assert run_command(project, "apply", patched).stdout.splitlines()[1] == "CHANGELOG.md lists the changes"
    unapply(patched, project)
    assert contents(patched) == contents(pristine)


@pytest.mark.parametrize(("commit", "lost"), [("base/0.9.1", 2), ("HEAD~", 1)])
def test_export_that_deletes_patches_needs_a_flag(project: Path, tmp_path: Path, commit: str, lost: int):
    tree = tmp_path / "tree"
    run_command(project, "checkout", RELEASE, tree)
    git("reset", "--hard", "--quiet", commit, cwd=tree)
    line = refused(project, "export", tree, unchanged=project)
    assert f"its export would delete {lost} of the patches of verl 0.9.1" in line
    assert "deleted cfg-add-a-users-key-twice.patch" in run_command(project, "export", "--remove", tree).stdout


def test_environment_of_the_caller(tiny: Path, target: Path, tmp_path: Path):
    assert run_command(tiny, "status", target, env={"PYTHONSAFEPATH": "1"}).stdout == "unpatched: verl 0.9.1\n"
    (tmp_path / "file").write_text("")
    line = refused(tiny, "apply", target, unchanged=target, env={"PATH": str(tmp_path / "file")})
    assert "git is not installed: install it, or add its folder to PATH" in line
