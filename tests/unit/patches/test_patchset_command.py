"""The command line of scripts/patchset.py."""

import json
from pathlib import Path

import pytest
from support.patch_tool import patchset, refused
from support.tiny_stack import CONFIG, MODULE, OVERLAY, PART, RELEASE, STAMP


@pytest.mark.parametrize(
    "args", [[], ["appply", "x"], ["apply"], ["check", "--all", "--release", RELEASE], ["apply", "x", "--json"]]
)
def test_bad_usage_exits_with_2(tiny: Path, args: list[str]):
    done = patchset(tiny, *args)
    assert (done.returncode, done.stdout) == (2, "") and "usage: patchset" in done.stderr


def test_unknown_release_is_refused(tiny: Path, tmp_path: Path):
    assert "'9.9'; known: 0.9.1" in refused(tiny, "checkout", "9.9", tmp_path / "tree", unchanged=tmp_path)
    assert "'9.9'; known: 0.9.1" in refused(tiny, "check", "--release", "9.9", unchanged=tmp_path)


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
    (found,) = json.loads(patchset(tiny, "list", "--json").stdout)
    assert (found["name"], found["family"], found["copied"]) == (RELEASE, "C", [PART, MODULE, OVERLAY])
    assert [(patch["name"], patch["Reason"]) for patch in found["patches"]] == [
        ("fsdp-read-the-configured-dtype.patch", "local"),
        ("cfg-add-a-users-key-twice.patch", "pending"),
    ]
    assert "pending   [cfg] fix: add a user's key (twice!)" in patchset(tiny, "list").stdout


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
