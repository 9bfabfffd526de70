"""Download, check and unpack the wheels of releases."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from verl_precision.errors import Refused
from verl_precision.files import sha256
from verl_precision.patch.releases import VERL, Framework, find_release
from verl_precision.paths import CACHE


def wheel(release: str, framework: Framework = VERL) -> Path:
    """Return the wheel of a release of versions.toml, whose sha256 it must have."""
    expected, path = find_release(release, framework=framework).wheel_sha256, download(release, framework)
    if (actual := sha256(path)) != expected:
        raise Refused(f"{path} has sha256 {actual}, but versions.toml records {expected}; delete the file")
    return path


def download(release: str, framework: Framework = VERL) -> Path:
    """Return the release's wheel in .cache/wheels, downloading it with pip if it is not there.

    The wheel is only read, never run, so the Python that its metadata requires need not be this one.
    """
    folder = CACHE / "wheels"
    cached = next(folder.glob(f"{framework.distribution.replace('-', '_')}-{release}-*.whl"), None)
    if not cached:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            pip += ["--ignore-requires-python", "--dest", scratch, f"{framework.distribution}=={release}"]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1:]
                raise Refused(f"cannot download the wheel of {framework.distribution} {release}: {' '.join(reason)}")
            downloaded = next(Path(scratch).iterdir())
            cached = folder / downloaded.name
            os.replace(downloaded, cached)
    return cached


def unpacked_wheel(release: str, into: Path, framework: Framework = VERL) -> Path:
    """Unpack the release's wheel into the folder ``into`` and return that."""
    return unpack(wheel(release, framework), into)


def unpack(archive: Path, into: Path) -> Path:
    """Unpack a zip file into the folder ``into`` and return that."""
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(into)
    return into
