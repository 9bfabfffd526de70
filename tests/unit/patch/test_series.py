"""The two series of a release, ``precision`` and ``fixes``: applied, told apart, exchanged, exported."""

import json
import re
import shutil
from pathlib import Path

import pytest
from support.patch_tool import message, refused, run_command
from support.small_projects import CONFIG, ENGINE, MODULE, OAT_RELEASE, PROTOCOL, RELEASE, UNTOUCHED, wheel_of
from support.trees import contents, edit, git

from verl_precision.errors import Refused
from verl_precision.files import write
from verl_precision.patch.apply import apply, unapply
from verl_precision.patch.git_objects import package_blobs
from verl_precision.patch.releases import OAT, find_release
from verl_precision.patch.stack import load_stacks, verbatim_files
from verl_precision.patch.status import drift, status
from verl_precision.patch.wheels import unpack

FIX = "verl/utils/fix.py"
SUBJECT = "[ckpt] fix: keep the checkpoint"


@pytest.fixture
def two(project: Path, tmp_path: Path) -> Path:
    """The tiny project with a patch of ``fixes``, which changes a file of ``precision`` and another, and adds one."""
    tree = tmp_path / "tree-of-fixes"
    assert run_command(project, "checkout", RELEASE, tree).returncode == 0
    edit(tree / ENGINE, "# twice\n", "# twice\n# fixed\n")
    edit(tree / UNTOUCHED, "import", "# fixed\nimport")
    write(project / "patches/verl/fixes" / FIX, b"FIXED = True\n")
    git("commit", "-am", message(SUBJECT, Series="fixes"), cwd=tree)
    done = run_command(project, "export", tree)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return project


def checked(project: Path) -> str:
    return run_command(project, "check", "--release", RELEASE).stdout.removeprefix(f"verl {RELEASE}: ")


def exchange(project: Path, target: Path) -> list[tuple[str, str, str]]:
    """Apply the series in every order and return each state, series and last line but those of the fixes."""
    seen = []
    for fixes in (False, True, True, False):
        lines = [line for line in apply(target, project, fixes=fixes) if not line.startswith("  ")]
        found = status(target, project)
        seen.append((found.state, found.series, lines[-1].partition(": ")[2]))
        assert (target / FIX).exists() == fixes and (target / MODULE).exists()
        assert ("# fixed" in (target / ENGINE).read_text()) == fixes
    return seen


def test_series_are_applied_exchanged_and_removed(two: Path, pristine: Path, target: Path):
    precision, both = load_stacks(two)
    titles = [f"stack {precision.id} (precision)", f"stack {both.id} (precision and fixes)"]
    assert exchange(two, target) == [
        ("patched", "precision", f"3 files patched, 3 added, {titles[0]}"),
        ("patched", "precision and fixes", f"4 files patched, 4 added, {titles[1]}"),
        ("patched", "precision and fixes", "nothing to do"),
        ("patched", "precision", f"3 files patched, 3 added, {titles[0]}"),
    ]
    apply(target, two)
    unapply(target, two)
    assert contents(target) == contents(pristine)
    assert checked(two) == "3 patches, 4 files patched, 4 added: ok\n"


def test_command_applies_fixes_on_request_and_says_what_they_correct(two: Path, target: Path):
    first = run_command(two, "apply", target).stdout
    assert "(precision)" in first and SUBJECT not in first
    second = run_command(two, "apply", "--fixes", target).stdout.splitlines()
    assert second[-1] == f"  {SUBJECT}" and "removed first" in second[0]
    assert "(precision and fixes)" in run_command(two, "status", target).stdout
    assert json.loads(run_command(two, "status", "--json", target).stdout)["series"] == "precision and fixes"
    third = run_command(two, "apply", target).stdout.splitlines()
    assert third[1] == 'the series "fixes" was removed; FIXES=yes puts it back'
    assert f"ckpt-keep-the-checkpoint.patch (fixes): 1 of 2 files\n    changed  {UNTOUCHED}" in drifted(two, target)


def drifted(project: Path, target: Path) -> str:
    edit(target / UNTOUCHED, "import", "# mine\nimport")
    return "\n".join(drift(target, project))


@pytest.mark.parametrize("file", [FIX, UNTOUCHED])
@pytest.mark.parametrize("patched", [False, True])
def test_fixes_refuse_a_file_that_the_user_wrote_or_edited(two: Path, target: Path, file: str, patched: bool):
    """A file of the series ``fixes`` only: the other one is applied, and leaves it be."""
    if patched:
        apply(target, two, fixes=False)
    with (target / file).open("a") as text:
        text.write("# mine\n")
    line = refused(two, "apply", "--fixes", target, unchanged=target)
    assert re.search(rf"stack \w+ \(precision and fixes\) changes or adds {file}, edited here: save your edits", line)
    apply(target, two, fixes=False)
    assert status(target, two).state == "patched" and (target / file).read_text().endswith("# mine\n")


def test_files_of_fixes_stay_apart_and_precision_comes_first(two: Path, tmp_path: Path):
    assert FIX not in verbatim_files(two, fixes=False)
    release = find_release(RELEASE, two)
    assert release.tree_after_fixes and release.tree_after_fixes != release.tree_after
    tree = tmp_path / "tree"
    run_command(two, "checkout", RELEASE, tree)
    edit(tree / CONFIG, "# A key.", "# The key.")
    git("commit", "-am", message("[cfg] fix: word it"), cwd=tree)
    line = refused(two, "export", tree, unchanged=two)
    assert "cfg-word-it.patch follows ckpt-keep-the-checkpoint.patch of the series fixes" in line
    git("commit", "--amend", "-m", message("[cfg] fix: word it", Series="fixes"), cwd=tree)
    assert run_command(two, "export", tree).returncode == 0
    assert checked(two) == "4 patches, 4 files patched, 4 added: ok\n"
    git("reset", "--hard", "HEAD~2", cwd=tree)
    assert run_command(two, "export", "--remove", tree).returncode == 0
    assert find_release(RELEASE, two).tree_after_fixes == ""


def test_framework_of_one_series_takes_no_fixes(two: Path, tmp_path: Path):
    root = unpack(wheel_of(two, OAT_RELEASE, OAT), tmp_path / "oat")
    line = refused(two, "apply", "--fixes", root, unchanged=root)
    assert "--fixes: oat has no series fixes; apply without it" in line
    apply(root, two, OAT)
    assert (status(root, two, OAT).state, status(root, two, OAT).series) == ("patched", "")


def test_precision_needs_no_file_of_fixes():
    files = verbatim_files().keys() - verbatim_files(fixes=False).keys()
    assert files == {"verl/utils/checkpoint/manifest.py", "verl/utils/lora_sync.py"}
    uses = re.compile(rf"\b({'|'.join(Path(path).stem for path in files)})\b")
    for stack in load_stacks():
        lines = {fixes: [] for fixes in (False, True)}
        for patch in stack.patches:
            lines[patch.fixes] += [line for line in patch.text.splitlines() if line[:1] == "+" and uses.search(line)]
        assert lines[False] == [], str(stack.release)
        assert bool(lines[True]) == stack.fixes, "the search finds none, or the stack has another series"


@pytest.mark.parametrize("trailer", ["series: fixes", "Series: fix", "Series: Fixes"])
def test_another_series_is_refused(two: Path, tmp_path: Path, trailer: str):
    tree = tmp_path / "tree"
    run_command(two, "checkout", RELEASE, tree)
    edit(tree / CONFIG, "# A key.", "# The key.")
    git("commit", "-am", f"{message('[cfg] fix: word it')}\n{trailer}", cwd=tree)
    line = refused(two, "export", tree, unchanged=two)
    assert f"cfg-word-it.patch has {trailer}; allowed: Series: fixes, or no such trailer" in line


def test_files_of_fixes_without_a_patch_are_refused(project: Path):
    (project / "patches/verl/fixes").mkdir()
    (project / "patches/verl/fixes/fix.py").touch()
    done = run_command(project, "check", "--release", RELEASE)
    assert done.returncode == 1 and f"has files, and no patch of verl {RELEASE} is of the series fixes" in done.stderr


def test_fixes_are_known_after_another_installation(two: Path, pristine: Path, target: Path):
    """As pip does, which leaves what it did not install."""
    apply(target, two)
    for path in (ENGINE, CONFIG, PROTOCOL, UNTOUCHED):
        shutil.copy(pristine / path, target / path)
    assert "apply with FIXES=yes patches it again" in status(target, two).detail
    assert 'the series "fixes" was removed; FIXES=yes puts it back' in apply(target, two, fixes=False)


def test_tree_with_a_fix_made_by_hand_is_refused(two: Path, target: Path):
    """As after a merge by hand: the hooked files have the fix, and apply left no record."""
    apply(target, two)
    fixed = (target / ENGINE).read_bytes()
    unapply(target, two)
    (target / ENGINE).write_bytes(fixed)
    blobs = package_blobs(target)
    for fixes in (False, True):
        with pytest.raises(Refused):
            apply(target, two, fixes=fixes)
    assert package_blobs(target) == blobs and PROTOCOL in blobs
