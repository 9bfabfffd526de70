"""The check of a stack on its wheel, and every stack of the project."""

import json
from pathlib import Path

import pytest
from support.patch_tool import message, patchset
from support.tiny_stack import ENGINE, MODULE, RELEASE
from support.trees import edit, git

from lib.patches.check import check
from lib.patches.checkout import checkout
from lib.patches.export import export
from lib.patches.releases import FRAMEWORKS, Release, load_releases

NEW_FILE = f"""\
diff --git a/verl/new.py b/verl/new.py
new file mode 100644
index {"0" * 40}..{"1" * 40}
--- /dev/null
+++ b/verl/new.py
@@ -0,0 +1 @@
+A = 1
"""


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
        (
            "v0.9.1/cfg-add-a-users-key-twice.patch",
            "---\ndiff",
            f"---\n{NEW_FILE}diff",
            "change files that the release",
        ),
        ("v0.9.1/series", "cfg-add-a-users-key-twice.patch\n", "", "disagree about cfg-add-a-users-key-twice.patch"),
        ("v0.9.1/series", "fsdp-", "no.patch\nfsdp-", "disagree about no.patch"),
        ("v0.9.1/series", "fsdp-", "cfg-add-a-users-key-twice.patch\nfsdp-", "does not start from the verl/"),
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


def test_check_compiles_the_hooked_files(project: Path, tmp_path: Path):
    checkout(RELEASE, tmp_path / "tree", project)
    edit(tmp_path / "tree" / ENGINE, "import logging\n", "import logging\nimport\n")
    git("commit", "-am", message("[fsdp] feat: import nothing"), cwd=tmp_path / "tree")
    export(tmp_path / "tree", project)
    assert f"{ENGINE} of verl 0.9.1 does not compile" in patchset(project, "check").stderr


def test_check_counts_a_good_stack(tiny: Path):
    done = patchset(tiny, "check", "--release", RELEASE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "verl 0.9.1: 2 patches, 3 files hooked, 3 copied: ok\n"


RELEASES = [release for framework in FRAMEWORKS.values() for release in load_releases(framework=framework).values()]


@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_stack_of_the_project_passes(release: Release):
    assert check(release.name, framework=release.framework)
