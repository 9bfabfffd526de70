"""Upstream's own CPU tests pass on both stacks of each release as on the unpatched one: none is lost, none gained.

They are not in verl's wheels: VERL_CHECKOUT in the environment is a git checkout of verl with the releases' tags.
"""

import os
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from support.trees import git

import pr_branch
from lib.patches.apply import apply
from lib.patches.releases import load_releases
from lib.paths import REPO

CHECKOUT = os.environ.get("VERL_CHECKOUT")
PYTHON = REPO / ".venv-workers/bin/python"
FILE_S = 240  # some hang without a network, patched or not


def passed(tree: Path, out: Path, file: Path) -> set[str]:
    """Return the names of the tests in a file that pass; of a file that hangs, none."""
    report = out / f"{file.relative_to(tree).as_posix().replace('/', '.')}.xml"
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tree}", f"--junitxml={report}"]
    environment = pr_branch.environment(tree, PYTHON) | {"RAY_USAGE_STATS_ENABLED": "0"}
    with report.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [PYTHON, "-m", "pytest", *options, file], cwd=tree, env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(FILE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
    if not report.exists():
        return set()
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{file.relative_to(tree)}::{case.get('classname')}::{case.get('name')}" for case in cases if not len(case)}


def passing(tree: Path, out: Path, files: Iterable[Path]) -> dict[Path, set[str]]:
    """Return by file the names of the tests that pass."""
    out.mkdir()
    files = sorted(files)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(files, pool.map(partial(passed, tree, out), files), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="VERL_CHECKOUT names no git checkout of verl")
@pytest.mark.parametrize("release", load_releases())
def test_upstreams_tests_pass_as_before(release: str, tmp_path: Path):
    tree = tmp_path / "verl"
    git("clone", "--quiet", "--shared", CHECKOUT, tree, cwd=tmp_path)
    if not git("tag", "--list", f"v{release}", cwd=tree):
        pytest.skip(f"{CHECKOUT} has no tag v{release}")
    git("checkout", "--quiet", f"v{release}", cwd=tree)
    unpatched = passing(tree, tmp_path / "unpatched", tree.glob("tests/**/*_on_cpu.py"))
    before = {file: names for file, names in unpatched.items() if names}
    assert before
    for stack, fixes in (("precision", False), ("precision and fixes", True)):
        apply(tree, fixes=fixes)
        after = passing(tree, tmp_path / stack, before)
        changed = {name for file in before for name in before[file] ^ after[file]}
        assert not changed, f"{stack}: {sorted(changed)}"
