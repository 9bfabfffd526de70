"""Ids of git objects, compared with git's own."""

from pathlib import Path

from support.trees import git, write_files

from lib.patches.git_objects import blob_id, package_blobs, package_tree_id
from lib.patches.releases import VERL

FILES = ("verl/__init__.py", "verl/a.py", "verl/a/b.py", "verl/a-b.py", "verl/a/c/d.yaml")


def test_ids_are_those_of_git(tmp_path: Path):
    """A folder sorts between two files; files of Python's and of apply's own do not count."""
    ignored = ("verl/a/__pycache__/b.cpython-311.pyc", "verl/c.pyc", VERL.stamp, f"{VERL.bookkeeping}/record.json")
    write_files(tmp_path, {path: path for path in (*FILES, *ignored)})
    git("init", "--quiet", cwd=tmp_path)
    git("add", *FILES, cwd=tmp_path)
    blobs = package_blobs(tmp_path)
    assert blobs == {path: git("hash-object", path, cwd=tmp_path).strip() for path in FILES}
    tree = git("write-tree", "--prefix=verl/", cwd=tmp_path).strip()
    assert package_tree_id(blobs) == tree
    assert blob_id(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
