"""The patch tool on OAT: a tiny stack on the wheel of 0.2.3 beside that of verl."""

import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.patch_tool import AS_A_USER, cut_short, entry, message, patchset, refused
from support.trees import contents, edit, git

from lib.errors import Refused
from lib.patches import wheels
from lib.patches.apply import apply, unapply
from lib.patches.git_objects import package_blobs
from lib.patches.port import destination
from lib.patches.releases import OAT, VERL, Framework, find_release
from lib.patches.stack import load_stacks
from lib.patches.status import status
from lib.patches.wheels import sha256, unpacked_wheel, wheel

RELEASE, NEWER = "0.2.3", "0.2.4"
ARGS = "oat/args.py"  # differs between the two
SAME = "oat/exploration.py"  # does not
UNTOUCHED = "oat/model.py"
MODULE = "oat/utils/precision.py"
STAMP = "oat/utils/precision_stamp.json"


@pytest.fixture(scope="session")
def both(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny project with a stack of OAT too: one patch on two files, one file to copy; read it, do not change it."""
    project = shutil.copytree(tiny, tmp_path_factory.mktemp("both") / "project", symlinks=True)
    for release in (RELEASE, NEWER):
        (project / ".cache/wheels" / wheel(release, OAT).name).symlink_to(wheel(release, OAT))
    (project / "patches/oat/versions.toml").write_text(f"{entry(RELEASE, 'oat')}\n{entry(NEWER, 'oat')}")
    (project / "patches/oat/files/oat/utils").mkdir(parents=True)
    (project / "patches/oat/files" / MODULE).write_text("ANSWER = 42\n")
    tree = project.parent / "tree"
    done = patchset(project, "checkout", "--framework", "oat", RELEASE, tree)
    assert done.stdout == f"oat 0.2.3 in {tree}: 0 patches as commits after the tag base/0.2.3\n"
    for path in (ARGS, SAME):
        edit(tree / path, "import torch\n", "import torch\nimport oat.utils.precision\n")
    git("commit", "-am", message("[args] feat: import the module"), cwd=tree)
    done = patchset(project, "export", tree)
    assert done.stdout == f"oat 0.2.3: 1 patches in {project}/patches/oat/v0.2.3\n"
    return project


@pytest.fixture
def project(both: Path, tmp_path: Path) -> Path:
    """A copy of the project to change."""
    return shutil.copytree(both, tmp_path / "project", symlinks=True)


@pytest.fixture(scope="session")
def wheel_of_oat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of 0.2.3, unpacked; read it, do not change it."""
    return unpacked_wheel(RELEASE, tmp_path_factory.mktemp("oat"), OAT)


@pytest.fixture
def target(wheel_of_oat: Path, tmp_path: Path) -> Path:
    """An unpacked release to change."""
    return shutil.copytree(wheel_of_oat, tmp_path / "target")


@pytest.fixture
def patched(both: Path, target: Path) -> Path:
    apply(target, both, OAT)
    return target


# --- apply and unapply ----------------------------------------------------------------------------------------------


def test_unapply_restores_what_apply_changed(both: Path, wheel_of_oat: Path, target: Path):
    done = patchset(both, "apply", target)
    assert (done.returncode, done.stderr) == (0, "")
    (own,) = (each for each in load_stacks(both, OAT) if each.patches)
    assert done.stdout == f"oat 0.2.3: 2 files hooked, 1 copied, stamp {own.id} in {STAMP}\n"
    assert json.loads((target / STAMP).read_text())["stack"] == own.id
    changed = package_blobs(target, OAT).items() - package_blobs(wheel_of_oat, OAT).items()
    assert {path for path, _ in changed} == {ARGS, SAME, MODULE}
    assert patchset(both, "status", target / "oat").stdout == f"patched: oat 0.2.3 with stack {own.id}\n"
    found = json.loads(patchset(both, "status", target, "--json").stdout)
    assert (found["framework"], found["release"], found["state"]) == ("oat", RELEASE, "patched")
    assert "nothing to do" in patchset(both, "apply", "--framework", "oat", target).stdout
    done = patchset(both, "unapply", target)
    assert done.stdout == f"oat 0.2.3: stack {own.id} removed, 2 files restored, 1 deleted\n"
    assert contents(target) == contents(wheel_of_oat)


def test_folder_with_both_frameworks_needs_a_choice(both: Path, pristine: Path, target: Path):
    shutil.copytree(pristine / "verl", target / "verl")
    for command in ("status", "apply", "unapply", "drift"):
        line = refused(both, command, target, unchanged=target)
        assert line == f"patchset: {target} contains verl and oat; choose one: --framework verl or oat\n"
    before = contents(target)
    assert patchset(both, "apply", "--framework", "oat", target).stdout.startswith("oat 0.2.3: 2 files hooked")
    states = [patchset(both, "status", "--framework", name, target).stdout for name in ("verl", "oat")]
    assert [state.partition(":")[0] for state in states] == ["pristine", "patched"]
    assert patchset(both, "apply", "--framework", "verl", target).stdout.startswith("verl 0.9.1: 3 files hooked")
    for name in ("oat", "verl"):
        assert patchset(both, "unapply", "--framework", name, target).returncode == 0
    assert contents(target) == before


def test_path_of_a_package_selects_its_framework(both: Path, pristine: Path, target: Path):
    shutil.copytree(pristine / "verl", target / "verl")
    for name in ("verl", "oat"):
        assert patchset(both, "status", target / name).stdout.startswith(f"pristine: {name} ")


# --- refusals -------------------------------------------------------------------------------------------------------


def dirty(root: Path) -> None:
    edit(root / ARGS, "import torch\n", "import torch  # mine\n")


def foreign(root: Path) -> None:
    dirty(root)
    (root / UNTOUCHED).write_text("another = 'release'\n")


def edited(root: Path) -> None:
    edit(root / MODULE, "42", "43")


def lost(root: Path) -> None:
    shutil.rmtree(root / "oat/.precision")


FREE, PATCHED = "target", "patched"


@pytest.mark.parametrize(
    ("state", "spoil", "words"),
    [
        (FREE, dirty, f"dirty: oat 0.2.3, but for {ARGS}; save your edits, then reinstall oat 0.2.3 or check"),
        (FREE, dirty, "if they are a later commit's, make drift OAT={0} lists them, make port FRAMEWORK=oat FROM="),
        (FREE, foreign, "foreign: matches none of oat 0.2.3, 0.2.4; the closest is 0.2.3, of the 2 files"),
        (PATCHED, edited, f"dirty: edited after apply: {MODULE}; save the edits, then put the files back or reinstall"),
        (PATCHED, lost, "half-patched: oat 0.2.3, but {1} is patched and apply left no record"),
    ],
)
def test_edited_or_damaged_tree_is_refused(
    both: Path, request: pytest.FixtureRequest, state: str, spoil: Callable, words: str
):
    root = request.getfixturevalue(state)
    spoil(root)
    for command in ("apply", "unapply"):
        assert words.format(root, ARGS) in refused(both, command, root, unchanged=root)
    assert patchset(both, "status", root).returncode == 1


def test_partly_restored_tree_is_half_patched(both: Path, wheel_of_oat: Path, patched: Path):
    shutil.copy(wheel_of_oat / ARGS, patched / ARGS)
    line = refused(both, "apply", patched, unchanged=patched)
    assert f"half-patched: oat 0.2.3 with stack {load_stacks(both, OAT)[0].id}, but {ARGS} is not patched" in line
    assert patchset(both, "unapply", patched).returncode == 0
    assert contents(patched) == contents(wheel_of_oat)


def test_stack_of_another_project_version_is_named(project: Path, wheel_of_oat: Path, patched: Path):
    shutil.rmtree(project / "patches/oat/v0.2.3")
    text = (project / "patches/oat/versions.toml").read_text()
    (project / "patches/oat/versions.toml").write_text(text[text.index('["0.2.4"]') :])
    line = refused(project, "apply", patched, unchanged=patched)
    assert "patched by another version of this project, for oat 0.2.3, stack " in line
    assert f"make unapply-patches OAT={patched} removes that" in line
    assert patchset(project, "unapply", patched).returncode == 0
    assert contents(patched) == contents(wheel_of_oat)


@pytest.mark.parametrize("command", ["apply", "unapply"])
def test_read_only_folder_is_refused(both: Path, target: Path, command: str):
    if command == "unapply":
        apply(target, both, OAT)
    (target / "oat/utils").chmod(0o555)
    line = refused(both, command, target, unchanged=target, before=AS_A_USER)
    (target / "oat/utils").chmod(0o755)
    assert line == f"patchset: {target}/oat/utils is read-only; nothing was changed\n"


def test_command_killed_at_any_change_can_be_repaired(both: Path, wheel_of_oat: Path, tmp_path: Path):
    """Every intermediate tree has a known state, and unapply restores the wheel."""
    for path in (ARGS, SAME, "oat/utils/ops.py", "oat/__init__.py"):
        (tmp_path / "bare" / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(wheel_of_oat / path, tmp_path / "bare" / path)
    before, states, number = contents(tmp_path / "bare"), set(), 0

    def run() -> None:
        apply(target, both, OAT)
        unapply(target, both, OAT)

    while True:
        target = shutil.copytree(tmp_path / "bare", tmp_path / f"{number}", copy_function=os.link)
        if not cut_short(target, run, number, "killed"):
            break
        states.add(status(target, both, OAT).state)
        unapply(target, both, OAT)
        assert contents(target) == before
        number += 1
    assert number > 15 and states == {"pristine", "interrupted", "patched"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("checkout", "--framework", "oat", "0.9.1", "tree"), "unknown oat release '0.9.1'; known: 0.2.3, 0.2.4"),
        (("check", "--framework", "oat", "--release", "9.9"), "unknown oat release '9.9'; known: 0.2.3, 0.2.4"),
        (("checkout", "0.2.3", "tree"), "unknown verl release '0.2.3'; known: 0.9.1"),
        (("apply", "--framework", "verl", "target"), "target contains no verl/__init__.py; give a checkout of verl"),
        (("apply", "--framework", "oat", "empty"), "empty contains no oat/__init__.py; give a checkout of oat, an"),
        (("status", "empty"), "empty contains no verl/__init__.py or oat/__init__.py; give a checkout of verl or oat"),
        (("status", "missing"), "missing is not a folder; give a checkout of verl or oat, an"),
        (("port", "--framework", "oat", "0.2.3", "empty", "tree"), "empty contains no oat/__init__.py"),
        (("port", "--framework", "oat", "0.2.4", "0.2.3", "tree"), "oat 0.2.4 has no patches to port"),
        (("port", "--framework", "oat", "0.2.3", "target", "tree"), "target is oat 0.2.3 itself"),
    ],
)
def test_bad_input_is_refused(both: Path, target: Path, tmp_path: Path, args: tuple[str, ...], words: str):
    (tmp_path / "empty").mkdir()
    assert words in refused(both, *args, unchanged=tmp_path, cwd=tmp_path)


def test_unknown_framework_is_a_usage_error(both: Path, target: Path):
    done = patchset(both, "apply", "--framework", "trl", target)
    assert done.returncode == 2 and "argument --framework: invalid choice: 'trl' (choose from 'verl', 'oat')" in (
        done.stderr
    )


def test_release_without_patches_is_pristine_but_cannot_be_patched(both: Path, tmp_path: Path):
    newer = unpacked_wheel(NEWER, tmp_path / "newer", OAT)
    assert patchset(both, "status", newer).stdout == "pristine: oat 0.2.4, no stack applied\n"
    assert "oat 0.2.4 has no patches yet" in refused(both, "apply", newer, unchanged=newer)


# --- list, check, port, drift ---------------------------------------------------------------------------------------


def test_list_covers_both_frameworks(both: Path):
    found = json.loads(patchset(both, "list", "--json").stdout)
    assert [f"{each['framework']} {each['name']}" for each in found] == ["verl 0.9.1", "oat 0.2.3", "oat 0.2.4"]
    assert (found[1]["family"], found[1]["copied"]) == ("B", [MODULE])
    assert [patch["name"] for patch in found[1]["patches"]] == ["args-import-the-module.patch"]
    lines = patchset(both, "list", "--framework", "oat").stdout.splitlines()
    assert re.fullmatch(r"oat 0\.2\.3: family B, stack \w{12}, 1 patches, 1 files copied", lines[0])
    assert "verl" not in "".join(lines)


def test_check_covers_both_frameworks(project: Path):
    done = patchset(project, "check", "--all")
    assert done.returncode == 1 and done.stderr == "patchset: oat 0.2.4: oat 0.2.4 has no patches yet\n"
    assert done.stdout.splitlines() == [
        "verl 0.9.1: 2 patches, 3 files hooked, 3 copied: ok",
        "oat 0.2.3: 1 patches, 2 files hooked, 1 copied: ok",
    ]
    edit(project / "patches/oat/versions.toml", 'tree_after = "', 'tree_after = "0')
    found = json.loads(patchset(project, "check", "--framework", "oat", "--json").stdout)
    assert list(found) == ["oat 0.2.3", "oat 0.2.4"] and "the series makes tree" in found["oat 0.2.3"]["detail"]


def test_port_and_drift_between_releases(project: Path, tmp_path: Path):
    newer = unpacked_wheel(NEWER, tmp_path / "newer", OAT)
    assert patchset(project, "drift", newer).stdout.splitlines() == [
        "closest to oat 0.2.3: 1 of the 2 files that its stack hooks differ",
        "args-import-the-module.patch: 1 of 2 files",
        f"    changed  {ARGS}",
    ]
    done = patchset(project, "port", "--framework", "oat", RELEASE, NEWER, tmp_path / "tree")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("oat 0.2.3 -> 0.2.4: 1 patches, 2 hooks: 1 same, 1 merged\n")
    assert patchset(project, "export", tmp_path / "tree").returncode == 0
    assert "oat 0.2.4: 1 patches, 2 files hooked, 1 copied: ok" in patchset(project, "check", "--all").stdout


def test_commit_is_named_by_its_version(both: Path, tmp_path: Path):
    commit = unpacked_wheel(NEWER, tmp_path / "commit", OAT)
    (commit / "oat/later.py").write_text("")
    done = patchset(both, "port", "--framework", "oat", RELEASE, commit, tmp_path / "tree")
    assert done.returncode == 0 and "is not a release, so they cannot be exported" in done.stdout
    assert git("tag", cwd=tmp_path / "tree").startswith("base/0.2.4+")


@pytest.mark.parametrize(
    ("framework", "text", "version"),
    [
        (VERL, "0.10.0.dev\n", "0.10.0.dev"),
        (VERL, "0.9.1+cu126\n", "0.9.1+cu126"),
        (OAT, '"""Version."""\n\n__version__ = "0.2.5"\n', "0.2.5"),
        (OAT, "__version__ = '0.2.5.dev1+g1a2b3c4'\n", "0.2.5.dev1+g1a2b3c4"),
    ],
)
def test_version_of_a_commit_is_read(both: Path, tmp_path: Path, framework: Framework, text: str, version: str):
    root = tmp_path / "commit"
    for path in (f"{framework.name}/__init__.py", framework.version_file):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (own,) = (each for each in load_stacks(both, framework) if each.patches)
    name, _, new_release = destination(str(root), own, both, tmp_path / "scratch")
    assert re.fullmatch(rf"{re.escape(version)}\+\w{{8}}", name) and new_release is None


def test_commit_without_a_version_is_refused(both: Path, target: Path, tmp_path: Path):
    (target / "oat/__about__.py").write_text("__version__ = read()\n")
    line = refused(both, "port", "--framework", "oat", RELEASE, target, tmp_path / "tree", unchanged=tmp_path)
    assert line == f"patchset: {target}: oat/__about__.py contains no version; give a checkout or a release\n"


def test_wheel_of_a_longer_version_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/oat_llm-0.2.1.post1-py3-none-any.whl").write_bytes(b"")
    monkeypatch.setattr(wheels, "CACHE", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 1, "", "not there"))
    assert wheels.download("0.2.1.post1", OAT).name == "oat_llm-0.2.1.post1-py3-none-any.whl"
    with pytest.raises(Refused, match="cannot download the wheel of oat-llm 0.2.1: not there"):
        wheels.download("0.2.1", OAT)


def test_port_adds_a_new_release_to_versions_toml(project: Path, tmp_path: Path):
    """Its wheel is oat_llm-…, as PyPI has it; here it is in the cache of wheels."""
    newer = unpacked_wheel(NEWER, tmp_path / "newer", OAT)
    made = project / ".cache/wheels/oat_llm-0.2.5-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path in sorted((newer / "oat").rglob("*")):
            archive.write(path, path.relative_to(newer))
        archive.writestr("oat/new.py", "")
    done = patchset(project, "port", "--framework", "oat", RELEASE, "0.2.5", tmp_path / "tree")
    assert done.returncode == 0 and 'with the family, dependencies and features of 0.2.3:\n["0.2.5"]' in done.stdout
    assert find_release("0.2.5", project, OAT).wheel_sha256 == sha256(made)
    assert patchset(project, "export", tmp_path / "tree").returncode == 0
    assert patchset(project, "check", "--framework", "oat", "--release", "0.2.5").returncode == 0
