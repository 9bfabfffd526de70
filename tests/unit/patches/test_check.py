"""The check of a stack on its wheel, and every stack of the project."""

import json
from pathlib import Path

import pytest
from support.patch_tool import message, patchset
from support.small_projects import ENGINE, MODULE, RELEASE, add_patches
from support.trees import edit

from lib.patches.check import check
from lib.patches.releases import FRAMEWORKS, Release, load_releases

HOOK = "cfg-add-a-users-key-twice.patch"
PATCH, SERIES = f"v0.9.1/{HOOK}", "v0.9.1/series"
NEW_FILE = f"""\
diff --git a/verl/new.py b/verl/new.py
new file mode 100644
index {"0" * 40}..{"1" * 40}
--- /dev/null
+++ b/verl/new.py
@@ -0,0 +1 @@
+A = 1
"""
RELEASES = [release for framework in FRAMEWORKS.values() for release in load_releases(framework=framework).values()]


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        (PATCH, "+key: 1", "+key: 2", "patched content does not match the blob id"),
        (PATCH, "Origin: here\n", "", "lacks the trailer Origin"),
        (PATCH, "Subject: [cfg] fix: add", "Subject: [cfg] fix: put", "re-export would change"),
        (PATCH, "---\ndiff", f"---\n{NEW_FILE}diff", "change files that the release"),
        (SERIES, f"{HOOK}\n", "", f"disagree about {HOOK}"),
        (SERIES, "fsdp-", "no.patch\nfsdp-", "disagree about no.patch"),
        (SERIES, "fsdp-", f"{HOOK}\nfsdp-", "does not start from the verl/"),
        (f"files/{MODULE}", "42", "= 42", f"{MODULE} of verl 0.9.1 does not compile"),
        ("versions.toml", 'wheel_sha256 = "', 'wheel_sha256 = "0', "but versions.toml records 0"),
        ("versions.toml", 'tree_after = "', 'tree_after = "0', "the series makes tree"),
        ("versions.toml", 'tree_before = "', 'tree_before = "0', "untouched files differ"),
    ],
)
def test_check_reports_each_fault(project: Path, file: str, old: str, new: str, named: str):
    edit(project / "patches/verl" / file, old, new)
    done = patchset(project, "check", "--framework", "verl", "--json")
    found = json.loads(done.stdout)[f"verl {RELEASE}"]
    assert (done.returncode, found["ok"]) == (1, False) and named in found["detail"]


def test_check_compiles_the_hooked_files(project: Path):
    broken = {ENGINE: ("import logging\n", "import logging\nimport\n")}
    add_patches(project, RELEASE, [(message("[fsdp] feat: import nothing"), broken)])
    assert f"{ENGINE} of verl 0.9.1 does not compile" in patchset(project, "check").stderr


def test_check_covers_both_frameworks(tiny: Path):
    done = patchset(tiny, "check", "--all")
    assert (done.returncode, done.stderr) == (1, "patchset: oat 0.2.4: oat 0.2.4 has no patches yet\n")
    assert done.stdout.splitlines() == [
        "verl 0.9.1: 2 patches, 3 files hooked, 3 copied: ok",
        "oat 0.2.3: 1 patches, 2 files hooked, 1 copied: ok",
    ]
    done = patchset(tiny, "check", "--release", RELEASE)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    found = json.loads(patchset(tiny, "check", "--framework", "oat", "--json").stdout)
    assert {release: outcome["ok"] for release, outcome in found.items()} == {"oat 0.2.3": True, "oat 0.2.4": False}


@pytest.mark.subprocess
@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_stack_of_the_project_passes(release: Release):
    assert check(release.name, framework=release.framework)
