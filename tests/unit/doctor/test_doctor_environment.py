"""``make doctor`` in the environment of the verl that it diagnoses, where nothing may be installed."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib.doctor import requirements
from lib.doctor.interpreter import find_interpreter
from lib.paths import REPO

SITE = Path(os.__file__).relative_to(sys.base_prefix).parent / "site-packages"
WORDS = "actor_rollout_ref.rollout.dtype=float16"


@pytest.fixture(scope="module")
def environments(trees, tmp_path_factory) -> dict[str, Path]:
    """The site-packages of two environments with only verl; ``whole`` also finds this environment's packages."""
    made = {}
    for name in ("whole", "bare"):
        folder = tmp_path_factory.mktemp(name)
        venv.create(folder, symlinks=True)
        made[name] = folder / SITE
        shutil.copytree(trees["pristine"] / "verl", made[name] / "verl")
    (hydra,) = requirements.importlib.util.find_spec("hydra").submodule_search_locations
    (made["whole"] / "packages.pth").write_text(str(Path(hydra).parent))
    return made


@pytest.mark.subprocess
def test_environment_of_the_verl_is_used(environments):
    verl = environments["whole"]
    line = [sys.executable, "scripts/command.py", "doctor", f"VERL={verl}", f"ARGS={WORDS}"]
    done = subprocess.run(line, cwd=REPO, capture_output=True, text=True)
    here = [sys.executable, "scripts/doctor.py", "--verl", str(verl), WORDS]
    assert done.stdout == subprocess.run(here, cwd=REPO, capture_output=True, text=True).stdout
    assert f"unpatched, in {verl}" in done.stdout and done.returncode == 1
    for folder in (verl, verl / "verl"):
        assert find_interpreter(folder, None) == str(verl.parents[2] / "bin/python3")


def test_named_python_is_used_for_a_tree_without_one(environments, trees, capfd):
    python = str(environments["whole"].parents[2] / "bin/python")
    assert find_interpreter(trees["pristine"], python) == find_interpreter(None, python) == python
    assert find_interpreter(trees["pristine"], None) is None
    beside = str(environments["whole"].parents[2] / "bin/python3")
    assert find_interpreter(environments["whole"], sys.executable) == beside, "the Python beside the verl comes first"
    assert find_interpreter(environments["bare"], None) is None
    assert "bin/python3 lacks hydra-core, omegaconf, which the doctor needs" in capfd.readouterr().err


def test_missing_packages_and_pythons_are_named(environments, trees, monkeypatch):
    for tree in (trees["pristine"], trees["patched"], None):
        assert requirements.missing(tree) == []
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    assert requirements.missing(trees["pristine"]) == []
    assert requirements.missing(trees["patched"]) == ["torch (for a patched verl)"]
    own = SimpleNamespace(submodule_search_locations=[str(trees["patched"] / "verl")])
    monkeypatch.setattr(requirements.importlib.util, "find_spec", {"hydra": 1, "omegaconf": 1, "verl": own}.get)
    assert requirements.missing(None) == ["torch (for a patched verl)"], "this Python's own verl is patched, too"
    monkeypatch.setattr(requirements, "PYTHON", (4, 0))
    assert requirements.missing(trees["pristine"]) == ["Python 4.0"]


def test_script_names_packages_that_its_python_lacks(environments):
    python = environments["bare"].parents[2] / "bin/python"
    done = subprocess.run([python, "scripts/doctor.py"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"doctor: {python} lacks hydra-core, omegaconf: install it there")
