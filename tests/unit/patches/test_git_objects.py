"""Ids of git objects, compared with git's own, and the functions that are sent to a cluster's nodes by value."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.trees import git

from lib.patches import git_objects, releases
from lib.patches.git_objects import blob_id, package_blobs, package_tree_id
from lib.patches.releases import VERL

FILES = ("verl/__init__.py", "verl/a.py", "verl/a/b.py", "verl/a-b.py", "verl/a/c/d.yaml")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A package with a folder that sorts between two files, and with files that do not count."""
    ignored = ("verl/a/__pycache__/b.cpython-311.pyc", "verl/c.pyc", VERL.stamp, f"{VERL.bookkeeping}/record.json")
    for path in (*FILES, *ignored):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    return tmp_path


def test_ids_are_those_of_git(root: Path):
    git("init", "--quiet", cwd=root)
    git("add", *FILES, cwd=root)
    blobs = package_blobs(root)
    assert blobs == {path: git("hash-object", path, cwd=root).strip() for path in FILES}
    assert package_tree_id(blobs) == git("rev-parse", f"{git('write-tree', cwd=root).strip()}:verl", cwd=root).strip()
    assert blob_id(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"


def test_functions_sent_to_other_nodes_reach_no_other_module(root: Path):
    """lib.run.cluster sends them by value, with these two modules, to nodes without a checkout of this project."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    for module in (git_objects, releases):
        cloudpickle.register_pickle_by_value(module)
    try:
        sent = cloudpickle.dumps((package_blobs, package_tree_id, VERL))
    finally:
        for module in (git_objects, releases):
            cloudpickle.unregister_pickle_by_value(module)
    code = """if True:
        import pathlib, sys
        from ray import cloudpickle
        package_blobs, package_tree_id, verl = cloudpickle.loads(sys.stdin.buffer.read())
        print(package_tree_id(package_blobs(pathlib.Path(sys.argv[1]))), verl.stamp, "lib" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code, str(root)], input=sent, cwd=root, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == [package_tree_id(package_blobs(root)), VERL.stamp, "False"]
