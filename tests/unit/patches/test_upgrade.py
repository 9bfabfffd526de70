"""Trees patched when ``verl.utils.precision`` was one module, not a package: recognised, upgraded, restored."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.trees import contents

from lib.errors import Refused
from lib.patches.apply import apply, unapply
from lib.patches.port import port
from lib.patches.precision_module import MODULE, PACKAGE, load_precision, precision_file
from lib.patches.releases import VERL
from lib.patches.status import status
from lib.patches.wheels import unpacked_wheel
from lib.paths import REPO

FOLDER = str(Path(PACKAGE).parent)
# In the order of their imports, so that one after the other they are one module.
PARTS = "dtypes roles gradients scaler accounting megatron keep_fp32 legacy wire rewards reporting".split()


def compile_files(*paths: Path) -> None:
    subprocess.run([sys.executable, "-m", "compileall", "-q", *paths], check=True)


@pytest.fixture(scope="module")
def older(tmp_path_factory) -> Path:
    """Return this project with the module in place of the package; its stamp file is beside the module as usual."""
    project = tmp_path_factory.mktemp("older")
    for part in ("patches/verl", "configs/precision"):
        shutil.copytree(REPO / part, project / part, ignore=shutil.ignore_patterns("__pycache__"))
    package = project / "patches/verl/files" / FOLDER
    lines = [line for part in PARTS for line in (package / f"{part}.py").read_text().splitlines()]
    assert sorted(f"{part}.py" for part in (*PARTS, "__init__")) == sorted(path.name for path in package.iterdir())
    shutil.rmtree(package)
    module = [line.replace("parents[1]", "parent") for line in lines if not line.startswith("from .")]
    (project / "patches/verl/files" / MODULE).write_text("\n".join(module) + "\n")
    return project


@pytest.fixture(scope="module", params=["0.4.1", "0.9.1"])
def pristine(request, tmp_path_factory) -> Path:
    """Return a folder with a release's package; tests change copies of it."""
    unpacked = unpacked_wheel(request.param, tmp_path_factory.mktemp("wheel"))
    root = tmp_path_factory.mktemp("pristine")
    shutil.move(unpacked / "verl", root / "verl")
    return root


@pytest.fixture
def patched(older: Path, pristine: Path, tmp_path: Path) -> Path:
    """Return a tree that the older project patched and Python compiled."""
    root = shutil.copytree(pristine, tmp_path / "patched")
    apply(root, older)
    compile_files(root / MODULE)
    return root


def test_older_stack_is_reported_and_upgraded_in_one_step(older: Path, pristine: Path, patched: Path, tmp_path: Path):
    theirs, found = status(patched, older), status(patched)
    assert (theirs.state, found.state, found.exact) == ("patched", "outdated", True)
    assert found.stamp["stack"] == theirs.stack != found.stack
    assert found.detail.endswith(f"with stack {theirs.stack}; apply brings it to {found.stack}")

    line = [sys.executable, "-S", "-B", REPO / "scripts/patchset.py", "apply", patched]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and f"stack {theirs.stack} removed first" in done.stdout
    fresh = shutil.copytree(pristine, tmp_path / "fresh")
    apply(fresh)
    assert contents(patched) == contents(fresh)
    assert not (patched / MODULE).exists() and not list(patched.rglob("*.pyc"))
    assert status(patched).state == "patched"


def test_older_stack_is_unapplied_byte_for_byte(pristine: Path, patched: Path):
    unapply(patched)
    assert contents(patched) == contents(pristine)


def test_older_project_unapplies_the_package(older: Path, pristine: Path, patched: Path, tmp_path: Path):
    apply(patched)
    compile_files(patched / FOLDER)
    apply(patched, older)
    fresh = shutil.copytree(pristine, tmp_path / "fresh")
    apply(fresh, older)
    assert contents(patched) == contents(fresh)
    unapply(patched)
    assert contents(patched) == contents(pristine)


def test_interrupted_upgrade_is_repaired(pristine: Path, patched: Path, tmp_path: Path):
    replace = os.replace

    def die_midway(source, to):
        if str(to).endswith("precision/legacy.py"):
            os._exit(9)
        replace(source, to)

    if (child := os.fork()) == 0:
        os.replace = die_midway
        apply(patched)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert status(patched).state == "interrupted"
    assert (patched / PACKAGE).exists() and not (patched / FOLDER / "legacy.py").exists()
    apply(patched)
    fresh = shutil.copytree(pristine, tmp_path / "fresh")
    apply(fresh)
    assert contents(patched) == contents(fresh)


def test_leftover_module_that_the_package_would_hide_is_refused(pristine: Path, tmp_path: Path):
    root = shutil.copytree(pristine, tmp_path / "root")
    (root / MODULE).write_text("mine = True\n")
    before = contents(root)
    assert status(root).state == "dirty"
    for command in (apply, unapply):
        with pytest.raises(Refused, match=f"dirty: verl .*, but for {MODULE}; save your edits"):
            command(root)
    with pytest.raises(Refused, match=f"contains {MODULE} already; remove its patches first"):
        port("0.9.0", str(root), tmp_path / "tree")
    assert contents(root) == before


def test_release_installed_over_a_patched_one_is_patched(pristine: Path, tmp_path: Path):
    """As pip does, which leaves what it did not install."""
    older = unpacked_wheel("0.9.0", tmp_path / "older")
    apply(older)
    root = shutil.copytree(pristine, tmp_path / "root")
    added = json.loads((older / VERL.bookkeeping / "record.json").read_text())["added"]
    shutil.copytree(older / VERL.bookkeeping, root / VERL.bookkeeping)
    for path in (VERL.stamp, *added):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(older / path, root / path)
    assert (status(root).state, status(root).release) == ("interrupted", status(pristine).release)
    apply(root)
    assert status(root).state == "patched"
    unapply(root)
    assert contents(root) == contents(pristine)


def test_edited_module_of_an_older_stack_is_refused(patched: Path):
    (patched / MODULE).write_text("mine = True\n")
    with pytest.raises(Refused, match=f"dirty: edited after apply: {MODULE};"):
        apply(patched)


def test_module_and_package_load_alike_and_leave_no_bytecode(pristine: Path, patched: Path, tmp_path: Path):
    assert precision_file(pristine) is None
    with pytest.raises(FileNotFoundError, match="has no verl/utils/precision"):
        load_precision(pristine, "precision_of_test")
    stamps = []
    for file in (MODULE, PACKAGE):
        assert precision_file(patched) == patched / file
        before = contents(patched)
        loaded = load_precision(patched, "precision_of_test")
        assert contents(patched) == before and Path(loaded.__file__) == patched / file
        resolved = loaded.Precision.of_worker({"dtype": "fp16"}, trained=True)
        assert resolved.names()["compute"] == "float16" and resolved.loss_scaling
        assert loaded.worker_scaler({}, resolved, "cpu").get_scale() == 65536.0
        stamps.append(loaded.patch_stamp()["stack"])
        apply(patched)
    assert stamps[0] != stamps[1] == status(patched).stack
    other = shutil.copytree(patched, tmp_path / "other")
    load_precision(other, "precision_of_test")
    assert Path(sys.modules["precision_of_test.dtypes"].__file__).is_relative_to(other)
    (patched / MODULE).write_text("")  # Python imports the package
    assert precision_file(patched) == patched / PACKAGE
