"""The check of a stack on its wheel, and every stack of the project."""

import json
from pathlib import Path

import pytest
from support.patch_tool import patchset
from support.tiny_stack import MODULE, RELEASE
from support.trees import edit

from lib.patches.check import check
from lib.patches.releases import FRAMEWORKS, Release, load_releases


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("v0.9.1/cfg-add-a-users-key-twice.patch", "+key: 1", "+key: 2", "patched content does not match the blob id"),
        ("v0.9.1/cfg-add-a-users-key-twice.patch", "Origin: here\n", "", "lacks the trailer Origin"),
        (
            "v0.9.1/cfg-add-a-users-key-twice.patch",
            "Subject: [cfg] fix: add",
            "Subject: [cfg] fix: put",
            "re-export would change",
        ),
        ("v0.9.1/series", "cfg-add-a-users-key-twice.patch\n", "", "disagree about cfg-add-a-users-key-twice.patch"),
        (f"files/{MODULE}", "42", "= 42", f"{MODULE} of verl 0.9.1 does not compile"),
        ("versions.toml", 'wheel_sha256 = "d', 'wheel_sha256 = "e', "has sha256 d"),
        ("versions.toml", 'tree_after = "', 'tree_after = "0', "the series makes tree"),
        ("versions.toml", 'tree_before = "', 'tree_before = "0', "untouched files differ"),
    ],
)
def test_check_reports_each_fault(project: Path, file: str, old: str, new: str, named: str):
    edit(project / "patches/verl" / file, old, new)
    done = patchset(project, "check", "--json", "--all")
    found = json.loads(done.stdout)
    assert (done.returncode, found[f"verl {RELEASE}"]["ok"]) == (1, False)
    assert named in found[f"verl {RELEASE}"]["detail"]


def test_check_counts_a_good_stack(tiny: Path):
    done = patchset(tiny, "check", "--release", RELEASE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "verl 0.9.1: 2 patches, 3 files hooked, 3 copied: ok\n"


RELEASES = [release for framework in FRAMEWORKS.values() for release in load_releases(framework=framework).values()]


@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_stack_of_the_project_passes(release: Release):
    assert check(release.name, framework=release.framework)
