"""The state of a target, on a few files of verl 0.9.1 with the tiny stack, and the refusals of apply and unapply."""

import json
import multiprocessing
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.small_projects import CONFIG, ENGINE, MODULE, PROTOCOL, RELEASE, STAMP
from support.trees import contents, edit

from verl_precision.errors import Refused
from verl_precision.files import write
from verl_precision.patch.apply import apply, unapply
from verl_precision.patch.closest import closest, count_unfit, unfit_hunks
from verl_precision.patch.git_objects import package_blobs
from verl_precision.patch.stack import load_stacks, make_stack
from verl_precision.patch.status import examine, status
from verl_precision.patch.target import locked, opened


def refusal(project: Path, target: Path, *commands: Callable) -> str:
    """Return the one refusal of these commands, of apply and unapply by default; they must change nothing."""
    before, lines = contents(target), set()
    for command in commands or (apply, unapply):
        with pytest.raises(Refused) as fault:
            command(target, project)
        lines.add(str(fault.value))
    (line,) = lines
    assert contents(target) == before and "\n" not in line
    return line


def test_edited_files_are_dirty(tiny: Path, target: Path):
    (target / MODULE).write_text("mine = True\n")  # where the stack adds a file
    assert f"dirty: verl 0.9.1 except {MODULE}; save your edits" in refusal(tiny, target)
    (target / MODULE).unlink()
    edit(target / PROTOCOL, "import copy", "import copy  # mine")
    line = refusal(tiny, target)
    assert f"dirty: verl 0.9.1 except {PROTOCOL}; save your edits" in line
    assert (
        f"reinstall verl 0.9.1, or keep them and merge the patches: make port FROM=0.9.1 TO={target}\n" in f"{line}\n"
    )
    for path in (ENGINE, CONFIG, MODULE):
        (target / path).write_text("mine\n")
    assert f"{ENGINE}, {PROTOCOL}, {CONFIG} and 1 more; save" in refusal(tiny, target)


def test_files_edited_after_apply_are_dirty(tiny: Path, patched: Path):
    for path in (ENGINE, MODULE):
        edit(patched / path, "\n", "\n# mine\n")
    line = refusal(tiny, patched)
    assert f"dirty: edited after apply: {MODULE}, {ENGINE}; make unapply-patches VERL={patched} FORCE=yes" in line
    assert "other files" not in str(status(patched, tiny))


@pytest.mark.parametrize("path", [CONFIG, MODULE])
def test_partly_restored_tree_is_half_patched(tiny: Path, pristine: Path, patched: Path, path: str):
    (patched / path).unlink()
    if path == CONFIG:
        shutil.copy(pristine / path, patched / path)
    line = refusal(tiny, patched, apply)
    assert "half-patched" in line and path in line and "unapply" in line
    unapply(patched, tiny)
    assert contents(patched) == contents(pristine)


def test_ported_fork_is_no_edited_release(tiny: Path, patched: Path):
    shutil.rmtree(patched / "verl/.precision")
    (patched / STAMP).unlink()
    edit(patched / ENGINE, "\n", "\n# of a fork\n")
    assert "ported: the patches of verl 0.9.1, or ones close to them, are commits" in refusal(tiny, patched)


@pytest.mark.parametrize("state", ["unpatched", "patched"])
def test_hunks_decide_which_release_is_closest(tiny: Path, target: Path, state: str):
    """Not the number of equal files: a stack that differs in one file may conflict there."""
    (own,) = load_stacks(tiny)
    if state == "patched":
        apply(target, tiny)
    for path in (ENGINE, CONFIG):
        (target / path).write_text((target / path).read_text() + "# of a fork\n")
    blobs = package_blobs(target)

    def read(path: str) -> bytes:
        return (target / path).read_bytes()

    hooks = [replace(each, text=each.text.replace("Implement base", "Implement another")) for each in own.patches]
    equal = {path: blobs[path] for path in (ENGINE, CONFIG)} | {PROTOCOL: "0" * 40}
    conflicting = replace(own, patches=tuple(hooks), before=equal, after=equal)
    assert (unfit_hunks(own, blobs, read), unfit_hunks(conflicting, blobs, read)) == ((0, 4), (1, 4))
    assert closest(blobs, read, [own, conflicting]) is own
    farther = replace(own, before={**own.before, PROTOCOL: "0" * 40}, after={**own.after, PROTOCOL: "0" * 40})
    assert closest(blobs, read, [own, farther]) is own
    newer = replace(own, release=replace(own.release, name="0.9.2"))
    assert closest(blobs, read, [own, newer]) is newer
    # A stack that hooks few would be the closest to anything if the number of hunks counted, not their share.
    few = make_stack(own.release, own.patches[:1], {})
    for path in (ENGINE, CONFIG):
        (target / path).write_text("mine\n")
    assert closest(package_blobs(target), read, [own, few]) is own


def test_hunk_that_upstream_has_taken_over_fits_beside_one_that_it_has_not():
    sides = [("\nold a\n", "\nnew a\n"), ("\nold b\n", "\nnew b\n")]
    texts = ("\nnew a\nold b\n", "\nold a\nold b\n", "\nnew a\nmine\n")
    assert [count_unfit(text, sides) for text in texts] == [0, 0, 1]


def test_stack_of_another_project_version_is_named(project: Path, pristine: Path, patched: Path, tmp_path: Path):
    """The other version has a release that this one lacks; with its record and without, as in a commit of the tree."""
    stacks = project / "patches/verl"
    edit(stacks / "versions.toml", '["0.9.1"]', '["0.9.0"]')
    (stacks / "v0.9.1").rename(stacks / "v0.9.0")
    edit(stacks / "v0.9.0/series", "cfg-add-a-users-key-twice.patch\n", "")
    (stacks / "v0.9.0/cfg-add-a-users-key-twice.patch").unlink()
    hook = stacks / "v0.9.0/fsdp-read-the-configured-dtype.patch"
    hook.write_text(re.sub(r"^index .* 100644$", f"index {'0' * 40}..{'1' * 40} 100644", hook.read_text(), flags=re.M))
    lost = shutil.copytree(patched, tmp_path / "lost", ignore=shutil.ignore_patterns(".precision"))
    without = "without the record in verl/.precision; save your edits, delete .*/verl and reinstall"
    assert re.search(f"half-patched: verl 0.9.1 with stack .*{without}", refusal(project, lost, apply))
    remedy = f"make unapply-patches VERL={patched} removes that"
    found = refusal(project, patched, apply)
    assert re.search(f"patched by another version of this project, for verl 0.9.1, stack .*{remedy}", found)
    unapply(patched, project)
    assert contents(patched) == contents(pristine)


def test_files_that_no_hook_touches_decide_between_releases(tiny: Path, target: Path):
    (own,) = load_stacks(tiny)
    other = replace(own, release=replace(own.release, name="0.1", tree_before="0" * 40))
    with locked(target) as found:
        assert examine(found, package_blobs(target), None, [other, own]).release == RELEASE


def test_lock_ends_with_the_command_while_a_forked_child_runs(target: Path, capfd: pytest.CaptureFixture):
    context = multiprocessing.get_context("fork")
    end = context.Event()
    with locked(target):
        child = context.Process(target=end.wait)
        child.start()
    opened(target)
    end.set()
    child.join()
    assert capfd.readouterr().err == ""


def test_stamp_of_another_stack_is_replaced_and_one_without_a_record_removed(tiny: Path, pristine: Path, patched: Path):
    before, other = contents(patched), json.dumps({"release": RELEASE, "stack": "another"})
    (patched / STAMP).write_text(other)
    assert status(patched, tiny).state == "interrupted"
    apply(patched, tiny)
    assert contents(patched) == before
    unapply(patched, tiny)
    (patched / STAMP).write_text(other)
    unapply(patched, tiny)
    assert contents(patched) == contents(pristine)


def test_bytecode_in_the_project_is_not_copied(project: Path, patched: Path):
    write(project / "patches/verl/files/verl/utils/__pycache__/precision.cpython-311.pyc", b"")
    assert status(patched, project).state == "patched"
