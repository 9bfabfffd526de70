"""The patch tool on OAT, beside verl in one project and in one folder, and what differs between the frameworks."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.patch_tool import refused, run_command
from support.small_projects import ARGS, FILES_OF_OAT, OAT_NEWER, OAT_RELEASE, cut_wheel, wheel_of
from support.trees import contents, edit, write_files

from verl_precision.errors import Refused
from verl_precision.patch import wheels
from verl_precision.patch.apply import apply, unapply
from verl_precision.patch.port import destination
from verl_precision.patch.releases import OAT, VERL, find_release
from verl_precision.patch.stack import load_stacks
from verl_precision.patch.wheels import sha256, unpack


def test_folder_with_both_frameworks_needs_a_choice(tiny: Path, target: Path, pristine_oat: Path):
    shutil.copytree(pristine_oat / "oat", target / "oat")
    for command in ("status", "unapply"):
        line = refused(tiny, command, target, unchanged=target)
        assert (
            line == f"verl-precision {command}: {target} contains verl and oat; choose one: --framework verl or oat\n"
        )
    before = contents(target)
    assert run_command(tiny, "apply", "--framework", "oat", target).stdout.startswith("oat 0.2.3: 2 files patched")
    assert run_command(tiny, "status", target / "verl").stdout == "unpatched: verl 0.9.1\n"
    found = json.loads(run_command(tiny, "status", target / "oat", "--json").stdout)
    assert (found["framework"], found["release"], found["state"]) == ("oat", OAT_RELEASE, "patched")
    assert run_command(tiny, "apply", "--framework", "verl", target).stdout.startswith("verl 0.9.1: 3 files patched")
    for framework in (OAT, VERL):
        unapply(target, tiny, framework)
    assert contents(target) == before


def test_refusals_name_oat_and_its_variable(tiny: Path, pristine_oat: Path, tmp_path: Path):
    target = shutil.copytree(pristine_oat, tmp_path / "oat")
    edit(target / ARGS, "import torch\n", "import torch  # mine\n")
    line = refused(tiny, "apply", target, unchanged=target)
    assert f"dirty: oat 0.2.3 except {ARGS}; save your edits, then reinstall oat 0.2.3, or keep" in line
    assert line.endswith(f"make port FRAMEWORK=oat FROM=0.2.3 TO={target}\n")
    (target / "oat/model.py").write_text("checked = 'out'\n")
    assert refused(tiny, "apply", target, unchanged=target) == line, "also where other files are not the wheel's"
    (target / OAT.version_file).write_text("__version__ = '0.3.0'\n")
    line = refused(tiny, "unapply", target, unchanged=target)
    assert "foreign: matches none of oat 0.2.3, 0.2.4; the closest is 0.2.3, of the 2 files" in line
    newer = unpack(wheel_of(tiny, OAT_NEWER, OAT), tmp_path / "newer")
    assert run_command(tiny, "status", newer).stdout == "unpatched: oat 0.2.4\n"
    assert "oat 0.2.4 has no patches yet" in refused(tiny, "apply", newer, unchanged=newer)


def test_port_adds_a_new_release_to_versions_toml(project: Path, tmp_path: Path):
    """Its wheel is oat_llm-…, as PyPI has it; here it is in the cache of wheels."""
    archive = wheel_of(project, OAT_NEWER, OAT)
    paths = ("oat/__init__.py", "oat/__about__.py", *FILES_OF_OAT)
    made = cut_wheel(archive, archive.with_name("oat_llm-0.2.5-py3-none-any.whl"), paths, {"oat/new.py": ""})
    newer = unpack(made, tmp_path / "newer")
    assert run_command(project, "drift", newer).stdout.splitlines() == [
        "closest to oat 0.2.3: 1 of the 2 files that its patches change differ",
        "args-import-the-module.patch: 1 of 2 files",
        f"    changed  {ARGS}",
    ]
    done = run_command(project, "port", "--framework", "oat", OAT_RELEASE, "0.2.5", tmp_path / "tree")
    assert done.returncode == 0
    assert 'with the family, dependencies and features of 0.2.3:\n["0.2.5"]' in done.stdout
    assert "oat 0.2.3 -> 0.2.5: 1 patches, 2 hunks: 1 same, 1 merged\n" in done.stdout
    old, new = (find_release(name, project, OAT) for name in (OAT_RELEASE, "0.2.5"))
    assert (new.wheel_sha256, new.ported_from) == (sha256(made), OAT_RELEASE)
    assert (new.family, new.features) == (old.family, old.features)
    assert run_command(project, "export", tmp_path / "tree").returncode == 0
    done = run_command(project, "check", "--framework", "oat", "--release", "0.2.5")
    assert done.stdout == "oat 0.2.5: 1 patches, 2 files patched, 1 added: ok\n"
    apply(newer, project, OAT)


def test_version_of_a_commit_is_read(tiny: Path, tmp_path: Path):
    root, scratch, about = tmp_path / "commit", tmp_path / "scratch", OAT.version_file
    for framework, text in ((VERL, "0.9.1+cu126\n"), (OAT, "__version__ = '0.9.1+cu126'\n")):
        write_files(root, dict.fromkeys((f"{framework.name}/__init__.py", framework.version_file), text))
        (own,) = (each for each in load_stacks(tiny, framework) if each.patches)
        name, _, new_release = destination(str(root), own, tiny, scratch / framework.name)
        assert re.fullmatch(r"0\.9\.1\+cu126\+\w{8}", name) and new_release is None
    (root / about).write_text("__version__ = read()\n")
    with pytest.raises(Refused, match=f"{about} contains no version; give a checkout or a release"):
        destination(str(root), own, tiny, scratch / "none")


def test_wheel_of_a_longer_version_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/oat_llm-0.2.1.post1-py3-none-any.whl").write_bytes(b"")
    monkeypatch.setattr(wheels, "CACHE", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 1, "", "not there"))
    assert wheels.download("0.2.1.post1", OAT).name == "oat_llm-0.2.1.post1-py3-none-any.whl"
    with pytest.raises(Refused, match="cannot download the wheel of oat-llm 0.2.1: not there"):
        wheels.download("0.2.1", OAT)
