"""The patch tool, on the wheel of verl 0.9.1 with a tiny stack that it makes itself, and on the project's stacks."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.patch_tool import AS_A_USER, cut_short, entry, message, patchset, refused
from support.trees import contents, edit, git

from lib.patches.apply import apply, unapply
from lib.patches.check import check
from lib.patches.checkout import checkout
from lib.patches.export import export
from lib.patches.git_objects import package_blobs, package_tree_id
from lib.patches.releases import find_release, load_releases
from lib.patches.stack import closest, load_stacks
from lib.patches.status import status
from lib.patches.target import locked
from lib.patches.wheels import unpacked_wheel, wheel
from lib.paths import REPO

RELEASE = "0.9.1"
ENGINE = "verl/workers/engine/fsdp/transformer_impl.py"
CONFIG = "verl/trainer/config/ppo_trainer.yaml"
PROTOCOL = "verl/protocol.py"
UNTOUCHED = "verl/utils/device.py"
MODULE = "verl/utils/precision.py"
PART = "verl/new_room/part.py"
OVERLAY = "verl/trainer/config/precision/fp16.yaml"
STAMP = "verl/utils/precision_stamp.json"


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the wheel of 0.9.1, unpacked; read it, do not change it."""
    root = unpacked_wheel(RELEASE, tmp_path_factory.mktemp("wheel"))
    for beside in ("scripts", "tests"):  # no matter here, and every copy is the quicker
        shutil.rmtree(root / beside)
    return root


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose stack has two patches on three files and three files to copy; read it, do not change it."""
    project = tmp_path_factory.mktemp("tiny") / "project"
    shutil.copytree(REPO / "scripts", project / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (project / ".cache/wheels").mkdir(parents=True)
    (project / ".cache/wheels" / wheel(RELEASE).name).symlink_to(wheel(RELEASE))
    for path, text in {
        "patches/verl/versions.toml": entry(RELEASE),
        "patches/oat/versions.toml": "",
        f"patches/verl/files/{MODULE}": "ANSWER = 42\n",
        f"patches/verl/files/{PART}": "",
        "configs/precision/fp16.yaml": "# @package _global_\n",
    }.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
    tree = project.parent / "tree"
    checkout(RELEASE, tree, project)
    edit(tree / ENGINE, "import logging\n", "import logging\nimport verl.utils.precision\n")
    git("commit", "-am", message("[fsdp, worker] feat: read the configured dtype"), cwd=tree)
    edit(tree / ENGINE, "import logging\n", "import logging\n# twice\n")
    edit(tree / CONFIG, "# Format", "# A key.\nkey: 1\n\n# Format")
    edit(tree / PROTOCOL, "Implement base", "Hooked. Implement base")
    git("commit", "-am", message("[cfg] fix: add a user's key (twice!)", Reason="pending"), cwd=tree)
    export(tree, project)
    return project


@pytest.fixture
def project(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny project to change."""
    return shutil.copytree(tiny, tmp_path / "project", symlinks=True)


@pytest.fixture
def target(pristine: Path, tmp_path: Path) -> Path:
    """An unpacked release to change."""
    return shutil.copytree(pristine, tmp_path / "target")


@pytest.fixture
def patched(tiny: Path, target: Path) -> Path:
    apply(target, tiny)
    return target


# --- apply and unapply ----------------------------------------------------------------------------------------------


def test_apply_hooks_copies_and_stamps(tiny: Path, pristine: Path, target: Path):
    (target / ENGINE).chmod(0o640)
    done = patchset(tiny, "apply", target)
    assert (done.returncode, done.stderr) == (0, "")
    assert (target / ENGINE).stat().st_mode & 0o777 == 0o640
    assert "verl 0.9.1: 3 files hooked, 3 copied, stamp " in done.stdout
    assert "# twice\nimport verl.utils.precision\n" in (target / ENGINE).read_text()
    assert (target / CONFIG).read_text().startswith("# A key.\nkey: 1\n")
    assert (target / MODULE).read_text() == "ANSWER = 42\n"
    assert (target / OVERLAY).read_text() == "# @package _global_\n"
    expected = {"release": RELEASE, "stack": load_stacks(tiny)[0].id}
    expected["tree"] = package_tree_id(package_blobs(target))
    assert json.loads((target / STAMP).read_text()) == expected
    changed = package_blobs(target).items() - package_blobs(pristine).items()
    assert {path for path, _ in changed} == {ENGINE, CONFIG, PROTOCOL, MODULE, PART, OVERLAY}


def test_unapply_gives_back_the_wheel(tiny: Path, pristine: Path, patched: Path):
    subprocess.run([sys.executable, "-m", "compileall", "-q", *(patched / path for path in (MODULE, PART))], check=True)
    done = patchset(tiny, "unapply", patched)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 files restored, 3 removed" in done.stdout
    assert contents(patched) == contents(pristine)
    for path in (ENGINE, CONFIG, PROTOCOL):
        old, new = (pristine / path).stat(), (patched / path).stat()
        assert (old.st_mode, old.st_mtime_ns) == (new.st_mode, new.st_mtime_ns)


@pytest.mark.parametrize("command", ["apply", "unapply"])
def test_both_are_idempotent(tiny: Path, target: Path, command: str):
    if command == "apply":
        apply(target, tiny)
    before = {path: (path.stat().st_ino, path.stat().st_ctime_ns) for path in target.rglob("*")}
    done = patchset(tiny, command, target)
    assert done.returncode == 0 and "nothing to do" in done.stdout
    assert {path: (path.stat().st_ino, path.stat().st_ctime_ns) for path in target.rglob("*")} == before


def test_what_python_compiled_before_is_not_used_after(tiny: Path, patched: Path):
    for command in (unapply, apply):
        subprocess.run([sys.executable, "-m", "compileall", "-q", patched / "verl/protocol.py"], check=True)
        subprocess.run([sys.executable, "-m", "compileall", "-q", patched / "verl/base_config.py"], check=True)
        command(patched, tiny)
        assert {path.name.split(".")[0] for path in (patched / "verl/__pycache__").iterdir()} == {"base_config"}


def test_a_newer_stack_replaces_the_older_one(project: Path, pristine: Path, patched: Path, tmp_path: Path):
    (project / "patches/verl/files" / MODULE).write_text("ANSWER = 43\n")
    (project / "patches/verl/files" / PART).unlink()
    tree = tmp_path / "tree"
    checkout(RELEASE, tree, project)
    edit(tree / UNTOUCHED, "import", "# one more file\nimport")
    git("commit", "-am", message("[worker] feat: one more file"), cwd=tree)
    git("revert", "--no-edit", "HEAD~1", cwd=tree)
    git("commit", "--amend", "-m", message("[cfg] fix: not the key"), cwd=tree)
    export(tree, project)
    assert status(patched, project).state == "outdated"
    done = patchset(project, "apply", patched)
    assert done.returncode == 0 and "taken off first" in done.stdout
    fresh = shutil.copytree(pristine, tmp_path / "fresh")
    apply(fresh, project)
    assert contents(patched) == contents(fresh)
    assert unapply(patched, project) and contents(patched) == contents(pristine)


def test_unapply_is_exact_whatever_became_of_the_stack(project: Path, pristine: Path, patched: Path):
    shutil.rmtree(project / "patches/verl/v0.9.1")
    shutil.rmtree(project / "patches/verl/files")
    unapply(patched, project)
    assert contents(patched) == contents(pristine)


def test_inside_another_git_repository(tiny: Path, pristine: Path, tmp_path: Path):
    git("init", "--quiet", cwd=tmp_path)
    (tmp_path / ".gitignore").write_text(".venv/\nscratch/\n")
    (tmp_path / "scratch").mkdir()
    target = shutil.copytree(pristine, tmp_path / ".venv/lib/site-packages")
    for environment in ({}, {"GIT_DIR": str(tmp_path / ".git"), "GIT_WORK_TREE": str(tmp_path)}):
        inside = {**os.environ, "TMPDIR": str(tmp_path / "scratch"), **environment}
        assert patchset(tiny, "apply", target, cwd=tmp_path, env=inside).returncode == 0
        assert "# twice" in (target / ENGINE).read_text()
        assert patchset(tiny, "unapply", target, cwd=tmp_path, env=inside).returncode == 0
        assert contents(target) == contents(pristine)


def test_a_git_checkout(tiny: Path, pristine: Path, tmp_path: Path):
    clone = tmp_path / "verl"
    shutil.copytree(pristine / "verl", clone / "verl")
    (clone / "verl/README.md").write_text("not in the wheel\n")
    git("init", "--quiet", cwd=clone)
    git("add", "--all", cwd=clone)
    git("commit", "--quiet", "-m", "verl", cwd=clone)
    found = status(clone, tiny)
    assert (found.state, found.release, found.exact) == ("pristine", RELEASE, False)
    assert patchset(tiny, "apply", clone).returncode == 0
    expected = {f" M {path}" for path in (ENGINE, CONFIG, PROTOCOL)} | {f"?? {path}" for path in (MODULE, STAMP)}
    expected |= {f"?? {path.rpartition('/')[0]}/" for path in (PART, OVERLAY)}
    assert set(git("status", "--porcelain", cwd=clone).splitlines()) == expected
    assert patchset(tiny, "unapply", clone).returncode == 0
    assert git("status", "--porcelain", "--ignored", cwd=clone) == ""


@pytest.mark.parametrize("name", ["target", "target/", "target/verl", "link"])
def test_ways_to_name_a_target(tiny: Path, target: Path, tmp_path: Path, name: str):
    (tmp_path / "link").symlink_to(target)
    assert patchset(tiny, "apply", name, cwd=tmp_path).returncode == 0
    assert status(target, tiny).state == "patched"


def test_one_at_a_time(tiny: Path, target: Path):
    before = contents(target)
    line = [sys.executable, "-B", tiny / "scripts/patchset.py", "apply", target]
    with locked(target):
        running = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for process in running:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=1)
        assert contents(target) == before
    printed = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sorted("nothing to do" in text for text in printed) == [False, True]
    assert status(target, tiny).state == "patched"


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["apply", "unapply"])
def test_dirty_before_apply(tiny: Path, target: Path, command: str):
    edit(target / PROTOCOL, "import copy", "import copy  # mine")
    line = refused(tiny, command, target, unchanged=target)
    assert "dirty" in line and PROTOCOL in line
    assert f"if they are a later commit's, make drift VERL={target} lists them, make port FRAMEWORK=verl F" in line


def test_edited_files_are_named_and_many_are_counted(tiny: Path, target: Path):
    for path in (ENGINE, PROTOCOL, CONFIG):
        (target / path).write_text("mine\n")
    line = refused(tiny, "apply", target, unchanged=target)
    assert f"dirty: verl 0.9.1, but for {ENGINE}, {PROTOCOL}, {CONFIG}; save your edits" in line
    (target / MODULE).write_text("mine\n")
    assert f"{CONFIG} and 1 more; save your edits" in refused(tiny, "apply", target, unchanged=target)


@pytest.mark.parametrize("path", [ENGINE, MODULE])
@pytest.mark.parametrize("command", ["apply", "unapply"])
def test_dirty_after_apply(tiny: Path, patched: Path, command: str, path: str):
    (patched / path).write_text((patched / path).read_text() + "# mine\n")
    line = refused(tiny, command, patched, unchanged=patched)
    assert "dirty" in line and path in line


def test_a_file_in_the_way(tiny: Path, target: Path):
    (target / MODULE).write_text("mine = True\n")
    line = refused(tiny, "apply", target, unchanged=target)
    assert "dirty" in line and MODULE in line


def test_an_edit_elsewhere_stays(tiny: Path, target: Path):
    (target / UNTOUCHED).write_text("mine = True\n")
    assert "untouched files differ" in patchset(tiny, "status", target).stdout
    before = contents(target)
    apply(target, tiny)
    assert (target / UNTOUCHED).read_text() == "mine = True\n"
    unapply(target, tiny)
    assert contents(target) == before


def test_half_patched_with_a_record(tiny: Path, pristine: Path, patched: Path):
    shutil.copy(pristine / CONFIG, patched / CONFIG)
    line = refused(tiny, "apply", patched, unchanged=patched)
    assert "half-patched" in line and CONFIG in line and "unapply" in line
    assert patchset(tiny, "unapply", patched).returncode == 0
    assert contents(patched) == contents(pristine)


@pytest.mark.parametrize("command", ["apply", "unapply"])
def test_half_patched_without_a_record(tiny: Path, pristine: Path, patched: Path, command: str):
    shutil.rmtree(patched / "verl/.precision")
    for path in (ENGINE, CONFIG):
        shutil.copy(pristine / path, patched / path)
    line = refused(tiny, command, patched, unchanged=patched)
    assert "half-patched" in line and PROTOCOL in line


@pytest.mark.parametrize("command", ["apply", "unapply"])
def test_foreign(tiny: Path, target: Path, command: str):
    for path in (ENGINE, UNTOUCHED):
        (target / path).write_text("another = 'release'\n")
    line = refused(tiny, command, target, unchanged=target)
    assert f"of the 3 files that its stack hooks, 1 differ: {ENGINE};" in line
    assert "matches none of verl 0.9.1; the closest is 0.9.1" in line
    carry = f"make port FRAMEWORK=verl FROM=0.9.1 TO={target} carries the stack over"
    assert f"make drift VERL={target} lists them, {carry}" in line


def test_the_closest_release_has_the_largest_share(tiny: Path, target: Path):
    """Not the fewest other files: a stack that hooks little would be the closest to anything."""
    (own,) = load_stacks(tiny)
    other = replace(own, release=replace(own.release, name="0.1"), before={PROTOCOL: "0" * 40})
    edit(target / ENGINE, "import logging", "import logging  # later")
    edit(target / CONFIG, "# Format", "# format")
    blobs = package_blobs(target)
    assert closest(blobs, [other, own]) is closest(blobs, [own, other]) is own


@pytest.mark.parametrize("kept", [True, False])
def test_patched_by_another_version_of_the_project(project: Path, pristine: Path, patched: Path, kept: bool):
    """One that knows a release that this one does not, with its record and without (as in a commit of the tree)."""
    stacks = project / "patches/verl"
    edit(stacks / "versions.toml", '["0.9.1"]', '["0.9.0"]')
    (stacks / "v0.9.1").rename(stacks / "v0.9.0")
    edit(stacks / "v0.9.0/series", "cfg-add-a-users-key-twice.patch\n", "")
    (stacks / "v0.9.0/cfg-add-a-users-key-twice.patch").unlink()
    hook = stacks / "v0.9.0/fsdp-read-the-configured-dtype.patch"
    hook.write_text(re.sub(r"^index .* 100644$", f"index {'0' * 40}..{'1' * 40} 100644", hook.read_text(), flags=re.M))
    if not kept:
        shutil.rmtree(patched / "verl/.precision")
    line = refused(project, "apply", patched, unchanged=patched)
    if kept:
        assert "patched by another version of this project, for verl 0.9.1, stack " in line
        assert f"make unapply-patches VERL={patched} takes that off" in line
        assert patchset(project, "unapply", patched).returncode == 0
        assert contents(patched) == contents(pristine)
    else:
        assert "half-patched: verl 0.9.1 with stack " in line
        assert "without the record in verl/.precision that unapply needs; reinstall verl 0.9.1 or check" in line


def test_version_strings_do_not_count(tiny: Path, target: Path):
    (target / "verl/version/version").write_text("0.4.1\n")
    assert status(target, tiny).release == RELEASE


@pytest.mark.parametrize("name", ["missing", "file", "empty"])
def test_no_verl_tree(tiny: Path, tmp_path: Path, name: str):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for command in ("status", "apply", "unapply"):
        assert str(tmp_path / name) in refused(tiny, command, tmp_path / name, unchanged=tmp_path)


@pytest.mark.parametrize("folder", ["verl", "verl/trainer/config"])
@pytest.mark.parametrize("command", ["apply", "unapply"])
def test_read_only(tiny: Path, target: Path, command: str, folder: str):
    if command == "unapply":
        apply(target, tiny)
    (target / folder).chmod(0o555)
    line = refused(tiny, command, target, unchanged=target, before=AS_A_USER)
    assert f"{target / folder} is read-only" in line
    assert patchset(tiny, "status", target, before=AS_A_USER).returncode == 0
    (target / folder).chmod(0o755)
    assert patchset(tiny, command, target).returncode == 0


def test_disk_full(tiny: Path, target: Path):
    size = (target / PROTOCOL).stat().st_size - 1

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    assert "File too large" in refused(tiny, "apply", target, unchanged=target, preexec_fn=limit)


def test_an_original_that_was_damaged(tiny: Path, patched: Path):
    (kept,) = (patched / "verl/.precision").glob("*ppo_trainer.yaml")
    edit(kept, "# Format", "# format")
    assert str(kept) in refused(tiny, "unapply", patched, unchanged=patched)


def test_reinstalled_over_the_stack(tiny: Path, pristine: Path, patched: Path, tmp_path: Path):
    for path in (ENGINE, CONFIG, PROTOCOL):
        shutil.copy(pristine / path, patched / path)
    assert status(patched, tiny).state == "interrupted"
    again = shutil.copytree(patched, tmp_path / "again")
    unapply(again, tiny)
    assert contents(again) == contents(pristine)
    apply(patched, tiny)
    assert status(patched, tiny).state == "patched"
    unapply(patched, tiny)
    assert contents(patched) == contents(pristine)


# --- cut short at every change ---------------------------------------------------------------------------------------


@pytest.fixture
def bare(pristine: Path, tmp_path: Path) -> Path:
    """A few of verl's files, the ones to hook among them, quick to copy."""
    for path in (ENGINE, CONFIG, PROTOCOL, UNTOUCHED, "verl/__init__.py"):
        (tmp_path / "bare" / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(pristine / path, tmp_path / "bare" / path)
    return tmp_path / "bare"


def copy(root: Path, name: str) -> Path:
    """Copy a tree beside itself as hard links, which some installers make."""
    return shutil.copytree(root, root.parent / name, copy_function=os.link)


def test_an_apply_that_fails_changes_nothing(tiny: Path, bare: Path):
    number = 0
    while cut_short(target := copy(bare, f"{number}"), lambda: apply(target, tiny), number, "failed"):
        assert contents(target) == contents(bare)
        number += 1
    assert number > 20


def test_killed_at_any_moment(tiny: Path, project: Path, pristine: Path, bare: Path):
    """An apply that takes off an older stack first passes through all that apply and unapply can do."""
    (project / "patches/verl/files" / MODULE).write_text("ANSWER = 43\n")
    older, newer = copy(bare, "older"), copy(bare, "newer")
    apply(older, tiny)
    apply(newer, project)
    states, number = set(), 0
    while cut_short(target := copy(older, f"{number}"), lambda: apply(target, project), number, "killed"):
        found = contents(target)
        states.add(status(target, project).state)
        assert contents(target) == found
        other = copy(target, f"{number}-other")
        unapply(other, project)
        assert contents(other) == contents(bare)
        apply(target, project)
        assert contents(target) == contents(newer)
        number += 1
    assert contents(target) == contents(newer)
    assert number > 40
    assert states == {"outdated", "pristine", "interrupted"}
    assert package_blobs(bare).items() <= package_blobs(pristine).items()
    assert package_tree_id(package_blobs(pristine)) == find_release(RELEASE).tree_before


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args", [[], ["appply", "x"], ["apply"], ["check", "--all", "--release", RELEASE], ["apply", "x", "--json"]]
)
def test_usage(tiny: Path, args: list[str]):
    done = patchset(tiny, *args)
    assert (done.returncode, done.stdout) == (2, "") and "usage: patchset" in done.stderr


def test_unknown_release(tiny: Path, tmp_path: Path):
    assert "'9.9'; known: 0.9.1" in refused(tiny, "checkout", "9.9", tmp_path / "tree", unchanged=tmp_path)
    assert "'9.9'; known: 0.9.1" in refused(tiny, "check", "--release", "9.9", unchanged=tmp_path)


def test_status_as_json(tiny: Path, patched: Path):
    done = patchset(tiny, "status", patched, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert (found["state"], found["release"], found["exact"]) == ("patched", RELEASE, True)
    assert found["stamp"] == json.loads((patched / STAMP).read_text())
    (patched / CONFIG).unlink()
    done = patchset(tiny, "status", patched, "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (1, "dirty")


def test_list(tiny: Path):
    (found,) = json.loads(patchset(tiny, "list", "--json").stdout)
    assert (found["name"], found["family"], found["copied"]) == (RELEASE, "C", [PART, MODULE, OVERLAY])
    assert [(patch["name"], patch["Reason"]) for patch in found["patches"]] == [
        ("fsdp-read-the-configured-dtype.patch", "local"),
        ("cfg-add-a-users-key-twice.patch", "pending"),
    ]
    assert "pending   [cfg] fix: add a user's key (twice!)" in patchset(tiny, "list").stdout


# --- checkout, export, check ----------------------------------------------------------------------------------------


@pytest.fixture
def tree(project: Path, tmp_path: Path) -> Path:
    """The tiny stack as commits."""
    assert patchset(project, "checkout", RELEASE, tmp_path / "tree").returncode == 0
    return tmp_path / "tree"


def test_checkout_holds_the_wheel_the_files_and_the_patches(tiny: Path, patched: Path, tree: Path):
    ids = git("log", "--reverse", "--format=%T", cwd=tree).split()
    subjects = git("log", "--reverse", "--format=%s", cwd=tree).splitlines()
    assert len(ids) == 4 and subjects[2:] == [patch.subject for patch in load_stacks(tiny)[0].patches]
    assert git("rev-parse", f"{ids[0]}:verl", cwd=tree).strip() == find_release(RELEASE, tiny).tree_before
    assert git("rev-parse", "HEAD:verl", cwd=tree).strip() == json.loads((patched / STAMP).read_text())["tree"]


def test_checkout_wants_an_empty_folder(tiny: Path, target: Path):
    assert "not an empty folder" in refused(tiny, "checkout", RELEASE, target, unchanged=target)


def test_export_writes_the_same_again(project: Path, tree: Path):
    before = contents(project)
    git("config", "diff.noprefix", "true", cwd=tree)
    git("config", "diff.context", "9", cwd=tree)
    assert patchset(project, "export", tree).returncode == 0
    assert contents(project) == before


def test_export_says_little_of_verl(tiny: Path):
    text = (tiny / "patches/verl/v0.9.1/fsdp-read-the-configured-dtype.patch").read_text()
    header, _, diff = text.partition("\n---\n")
    assert header == "Subject: " + message("[fsdp, worker] feat: read the configured dtype")
    lines = diff.splitlines()
    assert lines[0] == f"diff --git a/{ENGINE} b/{ENGINE}" and lines[4].startswith("@@ -18,2 +18,3 @@")
    assert lines[5:] == [" import logging", "+import verl.utils.precision", " import os"]


def test_plain_git_apply_takes_the_patches(tiny: Path, patched: Path, target: Path, pristine: Path, tmp_path: Path):
    by_hand = shutil.copytree(pristine, tmp_path / "by-hand")
    for patch in load_stacks(tiny)[0].patches:
        git("apply", str(tiny / "patches/verl/v0.9.1" / patch.name), cwd=by_hand)
    for path in (ENGINE, CONFIG, PROTOCOL):
        assert (by_hand / path).read_bytes() == (patched / path).read_bytes()


def test_export_takes_edits_of_the_files_home(project: Path, tree: Path):
    files = project / "patches/verl/files"
    (tree / MODULE).write_text("ANSWER = 43\n")
    (tree / OVERLAY).write_text("# changed\n")
    (tree / PART).unlink()
    (tree / "verl/utils/another.py").write_text("A = 1\n")
    edit(tree / UNTOUCHED, "import", "import verl.utils.another\nimport")
    git("add", "--all", cwd=tree)
    git("commit", "-m", message("[worker] feat: use another module"), cwd=tree)
    before = find_release(RELEASE, project).tree_after
    assert patchset(project, "export", tree).returncode == 0
    assert (files / MODULE).read_text() == "ANSWER = 43\n"
    assert (files / "verl/utils/another.py").read_text() == "A = 1\n" and not (files / PART).exists()
    assert (project / "configs/precision/fp16.yaml").read_text() == "# changed\n"
    assert (project / "patches/verl/v0.9.1/series").read_text().splitlines()[2] == "worker-use-another-module.patch"
    assert find_release(RELEASE, project).tree_after != before
    assert patchset(project, "check").returncode == 0


def test_export_does_not_overwrite_newer_files(project: Path, tree: Path):
    (tree / MODULE).write_text("ANSWER = 43\n")
    git("commit", "-am", message("[worker] feat: another answer"), cwd=tree)
    (project / "patches/verl/files" / MODULE).write_text("ANSWER = 44\n")
    assert MODULE in refused(project, "export", tree, unchanged=project)
    git("reset", "--hard", "--quiet", "HEAD~1", cwd=tree)
    assert patchset(project, "export", tree).returncode == 0
    assert (project / "patches/verl/files" / MODULE).read_text() == "ANSWER = 44\n"


def test_export_wants_whole_headers(project: Path, tree: Path):
    edit(tree / UNTOUCHED, "import", "# hook\nimport")
    git("commit", "-am", "hook", cwd=tree)
    for text, named in {
        "read the dtype": "'read the dtype' needs a subject like",
        message("[fsdp] wip: read"): "'[fsdp] wip: read' needs a subject like",
        message("[fsdp] feat: read", Origin=None, Forwarded=None): "lacks the trailer Origin and Forwarded",
        message("[fsdp] feat: read", Reason="none"): "Reason: none; allowed: backport, pending, local",
        message("[fsdp] fix: read the configured dtype"): "two commits would both be fsdp-read-the-configured-dtype",
        message("[fsdp] feat: read").replace("It exists", "---\nIt exists"): "lacks the trailer Reason",
    }.items():
        git("commit", "--amend", "-m", text, cwd=tree)
        assert named in refused(project, "export", tree, unchanged=project)


def test_export_wants_hooks_on_a_line(project: Path, tree: Path, target: Path):
    assert "is not a git tree made by checkout" in refused(project, "export", target, unchanged=project)
    edit(tree / UNTOUCHED, "import", "# hook\nimport")
    assert f"uncommitted changes: {UNTOUCHED}" in refused(project, "export", tree, unchanged=project)
    git("commit", "-am", message("[worker] feat: hook"), cwd=tree)
    git("reset", "--hard", "--quiet", "base/0.9.1~1", cwd=tree)
    assert "on top of base/0.9.1" in refused(project, "export", tree, unchanged=project)
    git("reset", "--hard", "--quiet", "ORIG_HEAD", cwd=tree)
    (tree / "setup.py").write_text("")
    git("add", "setup.py", cwd=tree)
    git("commit", "-m", message("[misc] feat: package"), cwd=tree)
    assert "changes setup.py, which is not in verl/" in refused(project, "export", tree, unchanged=project)
    git("reset", "--hard", "--quiet", "HEAD~1", cwd=tree)
    git("mv", UNTOUCHED, "verl/utils/moved.py", cwd=tree)
    git("commit", "-m", message("[worker] feat: move"), cwd=tree)
    assert f"removes {UNTOUCHED}" in refused(project, "export", tree, unchanged=project)


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("v0.9.1/cfg-add-a-users-key-twice.patch", "+key: 1", "+key: 2", "patched content does not match the blob id"),
        ("v0.9.1/cfg-add-a-users-key-twice.patch", "Origin: here\n", "", "lacks the trailer Origin"),
        ("v0.9.1/cfg-add-a-users-key-twice.patch", "Subject: [cfg] fix: add", "Subject: [cfg] fix: put", "differently"),
        ("v0.9.1/series", "cfg-add-a-users-key-twice.patch\n", "", "disagree about cfg-add-a-users-key-twice.patch"),
        (f"files/{MODULE}", "42", "= 42", f"{MODULE} of verl 0.9.1 does not compile"),
        ("versions.toml", 'wheel_sha256 = "d', 'wheel_sha256 = "e', "has sha256 d"),
        ("versions.toml", 'tree_after = "', 'tree_after = "0', "the series makes tree"),
        ("versions.toml", 'tree_before = "', 'tree_before = "0', "untouched files differ"),
    ],
)
def test_check_finds(project: Path, file: str, old: str, new: str, named: str):
    edit(project / "patches/verl" / file, old, new)
    done = patchset(project, "check", "--json", "--all")
    found = json.loads(done.stdout)
    assert (done.returncode, found[f"verl {RELEASE}"]["ok"]) == (1, False)
    assert named in found[f"verl {RELEASE}"]["detail"]


def test_check_of_a_good_stack(tiny: Path):
    done = patchset(tiny, "check", "--release", RELEASE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "verl 0.9.1: 2 patches, 3 files hooked, 3 copied: ok\n"


# --- the project's own stacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", load_releases())
def test_the_projects_stack(release: str):
    assert check(release)
