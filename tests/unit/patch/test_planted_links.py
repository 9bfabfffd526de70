"""Links that the owner of a tree plants while root patches it: nothing outside the tree changes."""

import os
import shutil
from pathlib import Path

import pytest
from support.patch_tool import interposed
from support.small_projects import ENGINE, MODULE
from support.trees import contents, edit

from verl_precision.patch.apply import apply, unapply

OWNER = 12345
SECRET = "of root\n"


def inodes(root: Path) -> dict[Path, tuple[int, int, int]]:
    """Return what changes of a file or folder that is written, moved or given away, by its path."""
    found = {path: path.lstat() for path in (root, *root.rglob("*"))}
    return {path: (status.st_ino, status.st_ctime_ns, status.st_uid) for path, status in found.items()}


@pytest.mark.subprocess
@pytest.mark.parametrize("planted", ["file", "folder"])
@pytest.mark.parametrize("command", ["upgrade", "unapply"])
def test_links_planted_before_any_change_lead_nowhere(
    tiny: Path, project: Path, patched: Path, tmp_path: Path, command: str, planted: str
):
    """In place of the file that is about to change, or of the folder that it is in."""
    (project / "patches/verl/files" / MODULE).write_text("ANSWER = 43\n")
    if command == "unapply":
        edit(patched / ENGINE, "\n", "\n# mine\n")
    number, outside, before = 0, tmp_path / "outside", {}

    def plant(paths: list[Path]) -> None:
        for place in sorted({path if planted == "file" else path.parent for path in paths}, reverse=True):
            victim = outside / str(len(list(outside.iterdir())))
            if place.is_symlink() or not place.is_relative_to(target / "verl"):
                continue
            if place.is_dir():
                shutil.copytree(place, victim)
            else:
                victim.write_text(SECRET)
            if place.exists():
                place.rename(f"{place}.moved")
            place.symlink_to(victim)
        before.update(inodes(outside))

    def run() -> None:
        apply(target, project) if command == "upgrade" else unapply(target, tiny, force=True)

    found = []
    while True:
        target = shutil.copytree(patched, tmp_path / f"{number}")
        if os.geteuid() == 0:
            for path in (target, *target.rglob("*")):
                os.chown(path, OWNER, OWNER)
        outside.mkdir()
        code = interposed(target, run, number, plant, lambda: inodes(outside) == before)
        if code == 0:
            break
        found.append(code)
        shutil.rmtree(outside)
        number += 1
    assert set(found) == {1} and len(found) > 10


def test_file_behind_a_planted_link_is_not_copied(
    tiny: Path, pristine: Path, target: Path, tmp_path: Path, monkeypatch
):
    """The copy would belong to the owner of the tree."""
    (tmp_path / "secret").write_text(SECRET)
    os_open, place = os.open, target / ENGINE

    def plant(path: str, *args: object, **options: object) -> int:
        if path == place.name and not place.is_symlink():
            place.unlink()
            place.symlink_to(tmp_path / "secret")
        return os_open(path, *args, **options)

    monkeypatch.setattr(os, "open", plant)
    with pytest.raises(OSError, match=f"; nothing was changed: '{place}'"):
        apply(target, tiny)
    assert {path for path, content in contents(target).items() if content == SECRET.encode()} == {ENGINE}
    assert contents(target).keys() == contents(pristine).keys()
