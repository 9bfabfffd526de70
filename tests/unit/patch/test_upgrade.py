"""Trees patched by former stacks, or before another release was installed: recognized, upgraded, restored."""

import io
import json
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.selected import every_release
from support.trees import contents

from verl_precision.patch.apply import apply, unapply
from verl_precision.patch.git import run_git
from verl_precision.patch.git_objects import package_blobs
from verl_precision.patch.precision_module import PACKAGE, load_precision, precision_file
from verl_precision.patch.releases import VERL, find_release
from verl_precision.patch.stack import load_stack, release_stacks
from verl_precision.patch.status import status
from verl_precision.patch.wheels import wheel
from verl_precision.paths import REPO


def hooked_files(release: str, root: Path, *projects: Path) -> Path:
    """Unpack the files of a release that the stacks of this and other projects change into ``root``; return that."""
    stacks = [load_stack(find_release(release), project) for project in (REPO, *projects)]
    with zipfile.ZipFile(wheel(release)) as archive:
        archive.extractall(root, {"verl/__init__.py"}.union(*(stack.before for stack in stacks)))
    return root


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """Return a folder with the files of a release that its stack changes; tests change copies of it."""
    return hooked_files("0.9.1", tmp_path_factory.mktemp("pristine"))


def test_release_installed_over_a_patched_one_is_patched(pristine: Path, tmp_path: Path):
    """As pip does, which leaves what it did not install."""
    older = hooked_files("0.9.0", tmp_path / "older")
    apply(older)
    root = shutil.copytree(pristine, tmp_path / "root")
    added = json.loads((older / VERL.bookkeeping / "record.json").read_text())["added"]
    shutil.copytree(older / VERL.bookkeeping, root / VERL.bookkeeping)
    for path in (VERL.stamp, *added):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(older / path, root / path)
    found = status(root)
    assert (found.state, found.release) == ("interrupted", status(pristine).release)
    hooked = root / next(path for path in package_blobs(root) if path.endswith("engine_workers.py"))
    unedited = hooked.read_bytes()
    hooked.write_bytes(unedited + b"# mine\n")
    assert f"{found.release} except {hooked.relative_to(root)}; save your edits" in status(root).detail
    hooked.write_bytes(unedited)
    apply(root)
    assert status(root).state == "patched"
    unapply(root)
    assert contents(root) == contents(pristine)


@pytest.mark.subprocess
def test_package_is_loaded_and_leaves_no_bytecode(pristine: Path, tmp_path: Path):
    assert precision_file(pristine) is None
    with pytest.raises(FileNotFoundError, match="has no verl/utils/precision"):
        load_precision(pristine, "precision_of_test")
    patched = shutil.copytree(pristine, tmp_path / "patched")
    apply(patched)
    before = contents(patched)
    loaded = load_precision(patched, "precision_of_test")
    assert contents(patched) == before and Path(loaded.__file__) == patched / PACKAGE == precision_file(patched)
    resolved = loaded.Precision.of_worker("fp16", {}, trained=True)
    assert resolved.names()["compute"] == "float16" and resolved.loss_scaling
    assert loaded.worker_scaler({}, resolved, "cpu").get_scale() == 65536.0
    assert loaded.patch_stamp()["stack"] == status(patched).stack
    other = shutil.copytree(patched, tmp_path / "other")
    load_precision(other, "precision_of_test")
    assert Path(sys.modules["precision_of_test.dtypes"].__file__).is_relative_to(other)


@pytest.mark.parametrize("release", every_release(VERL))
def test_former_stack_is_upgraded_to_either_series(release: str, tmp_path: Path):
    """The former stack of a release was one series, with the files of both."""
    former, root = tmp_path / "former", hooked_files(release, tmp_path / "root")
    for part in ("patches/verl", "configs/precision"):
        shutil.copytree(REPO / part, former / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(former / "patches/verl/fixes", former / "patches/verl/files", dirs_exist_ok=True)
    shutil.rmtree(former / "patches/verl/fixes")
    for patch in (former / f"patches/verl/v{release}").glob("*.patch"):
        patch.write_text(patch.read_text().replace("Series: fixes\n", ""))
    before = contents(root)
    stacks = {stack.fixes: stack for stack in release_stacks(find_release(release))}
    for fixes, other in ((False, True), (True, False)):
        apply(root, former)
        outdated = status(root)
        assert (outdated.state, outdated.stack) == ("outdated", stacks[True].id)
        assert f"apply with FIXES=yes brings it to stack {stacks[True].id} (precision and fixes)" in outdated.detail
        for wanted in (fixes, other):
            apply(root, fixes=wanted)
            assert (status(root).state, status(root).stack) == ("patched", stacks[wanted].id)
        unapply(root)
        assert contents(root) == before


# Commits of this project with other stacks: one series in one stack; two series, when precision always acted.
FORMER = {"one series": "a2f1537^", "acting unrequested": "29a047e"}


@pytest.fixture(scope="module", params=FORMER)
def former_project(request, tmp_path_factory) -> Path:
    """Return this project's patches as of a commit."""
    folder = tmp_path_factory.mktemp("former")
    archive = run_git("archive", FORMER[request.param], "patches/verl", "configs/precision", cwd=REPO)
    if archive.returncode:
        pytest.skip("this clone does not have the project's history")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(folder, filter="data")
    return folder


@pytest.mark.subprocess
@pytest.mark.parametrize("release", ["0.4.1", "0.7.1", "0.9.1"])  # one of each family
def test_stacks_of_a_former_commit_are_upgraded(release: str, former_project: Path, tmp_path: Path):
    root = hooked_files(release, tmp_path / "root", former_project)
    before = contents(root)
    stacks = {stack.fixes: stack.id for stack in release_stacks(find_release(release))}
    for former in release_stacks(find_release(release), former_project):
        apply(root, former_project, fixes=former.fixes)
        assert json.loads((root / VERL.stamp).read_text())["stack"] == former.id not in stacks.values()
        assert status(root).state == "outdated"
        for wanted in stacks:
            apply(root, fixes=wanted)
            assert (status(root).state, status(root).stack) == ("patched", stacks[wanted])
        unapply(root)
        assert contents(root) == before
