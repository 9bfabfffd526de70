"""Edits made while apply runs, after an interrupted unapply, or behind links: none is lost."""

import os
import shutil
from pathlib import Path

import pytest
from support.patch_tool import AS_A_USER, cut_short, refused, run_command
from support.small_projects import ENGINE, PART
from support.trees import contents, write_files

from verl_precision.errors import Refused
from verl_precision.patch.apply import apply, unapply
from verl_precision.patch.record import commit_staged
from verl_precision.patch.releases import VERL
from verl_precision.patch.status import status

EDIT = "# mine\n"


def edit(root: Path) -> None:
    (root / ENGINE).write_text((root / ENGINE).read_text() + EDIT)


@pytest.mark.subprocess
@pytest.mark.parametrize("change", [edit, lambda root: (root / ENGINE).unlink()], ids=["edited", "removed"])
def test_unapply_goes_on_around_a_file_that_changed(tiny: Path, pristine: Path, patched: Path, tmp_path: Path, change):
    places, number = set(), 0
    while cut_short(
        target := shutil.copytree(patched, tmp_path / f"{number}"), lambda: unapply(target, tiny), number, "killed"
    ):
        number += 1
        if not (target / VERL.bookkeeping / "record.json").exists():
            continue  # all is restored
        change(target)
        unapply(target, tiny, force=True)
        found, expected = contents(target), contents(pristine)
        ours = {path: found.pop(path) for path in (ENGINE, f"{ENGINE}.edited") if path in found}
        places |= {path for path, content in ours.items() if content.endswith(EDIT.encode())}
        assert found == {path: content for path, content in expected.items() if path != ENGINE}
        assert change is not edit or any(content.endswith(EDIT.encode()) for content in ours.values())
    assert number > 10 and places == ({ENGINE, f"{ENGINE}.edited"} if change is edit else set())


@pytest.mark.parametrize("start", ["release", "older"])
def test_file_edited_while_apply_runs_keeps_the_edit(tiny: Path, project: Path, target: Path, monkeypatch, start: str):
    if start == "older":
        apply(target, tiny)
    before = contents(target)

    def edit_meanwhile(found) -> None:
        commit_staged(found)
        edit(found.root)

    monkeypatch.setattr("verl_precision.patch.apply.commit_staged", edit_meanwhile)
    (project / "patches/verl/files/verl/utils/more.py").write_text("")
    with pytest.raises(Refused, match=f"{ENGINE} changed while apply ran; rolled back to the unpatched verl 0.9.1"):
        apply(target, project)
    after = contents(target)
    assert after.pop(ENGINE).decode().endswith(EDIT) and "verl/.precision" not in after
    assert after.keys() <= before.keys()


@pytest.mark.parametrize("command", ["apply", "unapply"])
def test_linked_folder_is_refused(tiny: Path, target: Path, tmp_path: Path, command: str):
    """The files behind it are not seen by what reads the package, and may be of another one."""
    linked = target / Path(PART).parent if command == "apply" else target / "verl/workers"
    own = tmp_path / "own"
    if command == "unapply":
        apply(target, tiny)
        os.rename(linked, own)
    write_files(own, {Path(PART).name: "mine\n", Path(ENGINE).name: "mine\n"})
    linked.parent.mkdir(exist_ok=True)
    linked.symlink_to(own)
    assert f"{linked} is in the way: it is a link" in refused(tiny, command, target, unchanged=tmp_path)


@pytest.mark.parametrize(("command", "relative"), [("apply", False), ("unapply", True)])
@pytest.mark.parametrize("change", [edit, lambda root: (root / ENGINE).unlink()], ids=["edited", "removed"])
def test_edited_file_behind_a_link_is_named(
    project: Path, pristine: Path, target: Path, tmp_path: Path, command: str, relative: bool, change
):
    """Not the link that apply keeps: its name is that of a file without edits."""
    own = shutil.copytree(pristine, tmp_path / "own")
    (target / ENGINE).unlink()
    link = os.path.relpath(own / ENGINE, (target / ENGINE).parent) if relative else own / ENGINE
    (target / ENGINE).symlink_to(link)
    apply(target, project)
    (project / "patches/verl/files/verl/utils/more.py").write_text("")
    change(own)
    line = refused(project, command, target, unchanged=tmp_path)
    changed = f"{own / ENGINE} was changed since apply; save your edits, then reinstall verl 0.9.1"
    assert line == f"verl-precision {command}: {changed}\n"


def test_folder_that_cannot_be_read_is_refused(tiny: Path, patched: Path):
    """Its files are not missing."""
    folder = (patched / ENGINE).parent
    folder.chmod(0o300)
    done = run_command(tiny, "unapply", patched, before=AS_A_USER)
    folder.chmod(0o755)
    assert (done.returncode, done.stderr) == (1, f"verl-precision unapply: {folder}: Permission denied\n")
    assert status(patched, tiny).state == "patched"


def test_name_that_is_not_utf8_is_kept(tiny: Path, pristine: Path, target: Path):
    name = os.fsdecode(b"\xff.py")
    (target / "verl" / name).write_text(EDIT)
    assert run_command(tiny, "apply", target).returncode == 0
    assert run_command(tiny, "unapply", target).returncode == 0
    assert contents(target) == contents(pristine) | {f"verl/{name}": EDIT.encode()}
