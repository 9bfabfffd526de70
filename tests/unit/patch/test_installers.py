"""The patches and uv, which installs verl as hard links into its cache, and may install it again."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl_precision.patch.apply import apply, unapply
from verl_precision.patch.git_objects import package_blobs
from verl_precision.patch.status import status
from verl_precision.patch.wheels import unpacked_wheel, wheel
from verl_precision.uv import find_uv

RELEASE = "0.9.1"


@pytest.mark.subprocess
def test_patches_leave_uvs_cache_alone_and_a_new_installation_is_noticed(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_LINK_MODE", "hardlink")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    install = ["install", "--no-deps", "--python", tmp_path / "venv/bin/python", wheel(RELEASE)]
    uv = find_uv()
    uv.pip(*install)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (cached,) = (folder.parent for folder in tmp_path.glob("cache/archive-v0/*/verl"))
    assert (site / "verl/protocol.py").samefile(cached / "verl/protocol.py")
    pristine = package_blobs(unpacked_wheel(RELEASE, tmp_path / "pristine"))

    apply(site)
    assert package_blobs(cached) == pristine
    uv.pip(*install)
    assert status(site).state == "patched", "nothing to install"

    uv.pip(*install, "--reinstall")
    assert status(site).state == "interrupted" and "verl was installed" in status(site).detail
    apply(site)
    assert status(site).state == "patched"
    assert package_blobs(cached) == pristine
    unapply(site)
    assert package_blobs(site) == pristine
