"""The command line of scripts/patchset.py."""

import json
import re
from pathlib import Path

import pytest
from support.patch_tool import patchset, refused
from support.small_projects import CONFIG, MODULE, OAT_MODULE, OVERLAY, PART, RELEASE, STAMP


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "COMMAND"),
        ("appply x", "invalid choice: 'appply'"),
        ("apply", "TARGET"),
        ("check --all --release 0.9.1", "not allowed with"),
        ("apply x --json", "unrecognized arguments: --json"),
        ("apply --framework trl x", "argument --framework: invalid choice: 'trl' (choose from 'verl', 'oat')"),
    ],
)
def test_bad_usage_exits_with_2(tiny: Path, line: str, named: str):
    done = patchset(tiny, *line.split())
    assert (done.returncode, done.stdout) == (2, "") and "usage: patchset" in done.stderr and named in done.stderr


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("checkout 9.9 tree", "unknown verl release '9.9'; known: 0.9.1"),
        ("check --release 9.9", "unknown verl release '9.9'; known: 0.9.1"),
        ("check --framework oat --release 9.9", "unknown oat release '9.9'; known: 0.2.3, 0.2.4"),
        ("checkout --framework oat 0.9.1 tree", "unknown oat release '0.9.1'; known: 0.2.3, 0.2.4"),
        ("status missing", "missing is not a folder; give a checkout of verl or oat, an unpacked release or"),
        ("apply file", "file is not a folder; give a checkout of verl or oat"),
        ("unapply empty", "empty contains no verl/__init__.py or oat/__init__.py; give a checkout of verl or oat"),
        ("apply --framework oat target", "target contains no oat/__init__.py; give a checkout of oat, an"),
        ("apply --framework verl target/numpy", "numpy contains no verl/__init__.py; give a checkout of verl, an"),
        ("port --framework oat 0.2.3 empty tree", "empty contains no oat/__init__.py"),
        ("port --framework oat 0.2.4 0.2.3 tree", "oat 0.2.4 has no patches to port"),
    ],
)
def test_bad_input_is_refused(tiny: Path, target: Path, tmp_path: Path, line: str, named: str):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (target / "numpy").mkdir()
    assert named in refused(tiny, *line.split(), unchanged=tmp_path, cwd=tmp_path)


def test_status_prints_json(tiny: Path, patched: Path):
    done = patchset(tiny, "status", patched, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert (found["state"], found["release"], found["exact"]) == ("patched", RELEASE, True)
    assert found["stamp"] == json.loads((patched / STAMP).read_text())
    (patched / CONFIG).unlink()
    done = patchset(tiny, "status", patched, "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (1, "dirty")


def test_list_prints_patches_with_their_reasons(tiny: Path):
    found = json.loads(patchset(tiny, "list", "--json").stdout)
    assert [f"{each['framework']} {each['name']}" for each in found] == ["verl 0.9.1", "oat 0.2.3", "oat 0.2.4"]
    verl, oat, _ = found
    assert (verl["family"], verl["copied"]) == ("C", [PART, MODULE, OVERLAY])
    assert [(patch["name"], patch["Reason"]) for patch in verl["patches"]] == [
        ("fsdp-read-the-configured-dtype.patch", "local"),
        ("cfg-add-a-users-key-twice.patch", "pending"),
    ]
    assert (oat["family"], oat["copied"]) == ("B", [OAT_MODULE])
    assert "pending   [cfg] fix: add a user's key (twice!)" in patchset(tiny, "list").stdout
    lines = patchset(tiny, "list", "--framework", "oat").stdout.splitlines()
    assert re.fullmatch(r"oat 0\.2\.3: family B, stack \w{12}, 1 patches, 1 files copied", lines[0])
    assert "verl" not in "".join(lines)


@pytest.mark.parametrize("args", [("list",), ("apply", "target"), ("checkout", RELEASE, "tree")])
def test_missing_git_is_refused(tiny: Path, target: Path, args: tuple[str, ...]):
    (target.parent / "bin").mkdir()
    without_git = {"PATH": str(target.parent / "bin")}
    line = refused(tiny, *args, unchanged=target.parent, cwd=target.parent, env=without_git)
    assert line == "patchset: git is not installed: install it, or add its folder to PATH\n"


def test_help_and_status_need_no_git(tiny: Path, target: Path):
    without_git = {"PATH": str(target.parent)}
    assert patchset(tiny, "--help", env=without_git).stdout.startswith("usage: patchset")
    assert patchset(tiny, "status", target, env=without_git).stdout == "pristine: verl 0.9.1, no stack applied\n"
