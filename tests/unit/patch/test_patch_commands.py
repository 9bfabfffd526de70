"""The commands on patches; the check of a stack on the wheel, and every stack of the project."""

import json
from pathlib import Path

import pytest
from support.patch_tool import message, refused, run_command
from support.selected import every_release
from support.small_projects import CONFIG, ENGINE, MODULE, RELEASE, STAMP, add_patches
from support.trees import edit

from verl_precision.patch.check import check
from verl_precision.patch.releases import OAT, VERL, load_releases


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("checkout 9.9 tree", "unknown verl release '9.9'; known: 0.9.1"),
        ("check --framework oat --release 9.9", "unknown oat release '9.9'; known: 0.2.3, 0.2.4"),
        ("status missing", "missing is not a folder; give a checkout of verl or oat, an unpacked release or"),
        ("unapply empty", "empty contains no verl/__init__.py or oat/__init__.py; give a checkout of verl or oat"),
        ("apply --framework verl target/numpy", "numpy contains no verl/__init__.py; give a checkout of verl, an"),
        ("port --framework oat 0.2.3 empty tree", "empty contains no oat/__init__.py"),
        ("port --framework oat 0.2.4 0.2.3 tree", "oat 0.2.4 has no patches to port"),
    ],
)
def test_bad_input_is_refused(tiny: Path, target: Path, tmp_path: Path, line: str, named: str):
    (tmp_path / "empty").mkdir()
    (target / "numpy").mkdir()
    assert named in refused(tiny, *line.split(), unchanged=tmp_path, cwd=tmp_path)


def test_status_prints_json(tiny: Path, patched: Path):
    done = run_command(tiny, "status", patched, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert (found["state"], found["release"], found["exact"]) == ("patched", RELEASE, True)
    assert found["stamp"] == json.loads((patched / STAMP).read_text())
    (patched / CONFIG).unlink()
    done = run_command(tiny, "status", patched, "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (1, "dirty")


def test_only_help_and_status_need_no_git(tiny: Path, target: Path):
    without_git = {"PATH": str(target.parent)}
    line = refused(tiny, "apply", target, unchanged=target.parent, env=without_git)
    assert line == "verl-precision apply: git is not installed: install it, or add its folder to PATH\n"
    assert run_command(tiny, "--help", env=without_git).stdout.startswith("usage: verl-precision")
    assert run_command(tiny, "status", target, env=without_git).stdout == "unpatched: verl 0.9.1\n"


HOOK = "cfg-add-a-users-key-twice.patch"
PATCH, SERIES = f"v0.9.1/{HOOK}", "v0.9.1/series"
NEW_FILE = "diff --git a/verl/new.py b/verl/new.py\nnew file mode 100644\n"


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        (PATCH, "+key: 1", "+key: 2", "patched content does not match the blob id"),
        (PATCH, "Origin: here\n", "", "lacks the trailer Origin"),
        (PATCH, "Subject: [cfg] fix: add", "Subject: [cfg] fix: put", "re-export would change"),
        (PATCH, "---\ndiff", f"---\n{NEW_FILE}diff", "change files that the release"),
        (SERIES, "fsdp-", "no.patch\nfsdp-", "disagree about no.patch"),
        (SERIES, "fsdp-", f"{HOOK}\nfsdp-", "does not start from the verl/"),
        (f"files/{MODULE}", "42", "= 42", f"{MODULE} of verl 0.9.1 does not compile"),
        ("versions.toml", 'wheel_sha256 = "', 'wheel_sha256 = "0', "but versions.toml records 0"),
        ("versions.toml", 'tree_after = "', 'tree_after = "0', "the series makes tree"),
        ("versions.toml", 'tree_before = "', 'tree_before = "0', "are not those of tree_before"),
    ],
)
def test_check_reports_each_fault(project: Path, file: str, old: str, new: str, named: str):
    edit(project / "patches/verl" / file, old, new)
    done = run_command(project, "check", "--framework", "verl")
    assert (done.returncode, done.stdout) == (1, "") and f"check: verl {RELEASE}: " in done.stderr
    assert named in done.stderr


def test_check_compiles_the_hooked_files(project: Path):
    broken = {ENGINE: ("import logging\n", "import logging\nimport\n")}
    add_patches(project, RELEASE, [(message("[fsdp] feat: import nothing"), broken)])
    assert f"{ENGINE} of verl 0.9.1 does not compile" in run_command(project, "check").stderr


def test_check_covers_both_frameworks(tiny: Path):
    done = run_command(tiny, "check", "--all")
    assert (done.returncode, done.stderr) == (1, "verl-precision check: oat 0.2.4: oat 0.2.4 has no patches yet\n")
    assert done.stdout.splitlines() == [
        "verl 0.9.1: 2 patches, 3 files patched, 3 added: ok",
        "oat 0.2.3: 1 patches, 2 files patched, 1 added: ok",
    ]
    done = run_command(tiny, "check", "--release", RELEASE)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    done = run_command(tiny, "check", "--framework", "oat")
    assert done.stdout.startswith("oat 0.2.3: ") and done.stderr.startswith("verl-precision check: oat 0.2.4: ")


@pytest.mark.subprocess
@pytest.mark.parametrize("release", [*every_release(VERL), *every_release(OAT)])
def test_stack_of_the_project_passes(release: str):
    assert check(release, framework=VERL if release in load_releases() else OAT)
