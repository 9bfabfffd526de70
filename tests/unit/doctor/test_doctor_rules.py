"""The doctor's table of dtype rules against the wheels, and on a release without rules of its own."""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.trees import edit

from lib.doctor.diagnosis import diagnose
from lib.doctor.dtype_rules import KNOWN, RULES
from lib.doctor.tree import identify_tree, table_release
from lib.errors import Refused
from lib.patches.apply import apply
from lib.patches.git_objects import package_blobs, package_tree_id
from lib.patches.releases import VERL, Release, add_release, find_release, load_releases
from lib.patches.stack import load_stack
from lib.patches.status import status
from lib.patches.wheels import unpacked_wheel, wheel
from lib.paths import REPO

RELEASES = load_releases()
OLD, NEW = "0.9.1", "0.9.2"


@pytest.mark.parametrize("release", RELEASES)
def test_rule_quotes_the_line_of_the_wheel(release: str):
    with zipfile.ZipFile(wheel(release)) as archive:
        for rule in RULES:
            if release in rule.lines:
                line = archive.read(f"verl/{rule.path}").decode().splitlines()[rule.lines[release] - 1]
                assert rule.text in line, f"{rule.path}:{rule.lines[release]}"


def test_patch_of_a_rule_is_in_the_series_of_its_releases():
    for name, release in RELEASES.items():
        series = {patch.name.removesuffix(".patch") for patch in load_stack(release).patches}
        patches = {rule.patch for rule in RULES if name in rule.lines and rule.patch}
        assert patches <= series, f"verl {name} has no {patches - series}"
        hooks = {f"verl/{rule.hook}" for rule in RULES if name in rule.lines and rule.hook}
        assert hooks <= load_stack(release).after.keys()


@pytest.mark.parametrize("release", RELEASES)
def test_each_hop_has_at_most_one_rule(release: str):
    rules = [rule for rule in RULES if release in rule.lines]
    decided = [(rule.hop.format(role=role), rule.implementation) for rule in rules for role in rule.roles]
    assert len(decided) == len(set(decided))


def test_rules_name_only_releases_of_versions_toml():
    assert KNOWN <= set(RELEASES)
    assert {table_release(release, RELEASES) for release in RELEASES.values()} <= KNOWN
    once = replace(RELEASES[OLD], name=NEW, ported_from=OLD)
    twice = replace(once, name="0.9.3", ported_from=NEW)
    assert table_release(twice, RELEASES | {NEW: once, twice.name: twice}) == OLD


# --- a new release is one entry of versions.toml and one folder -------------------------------------------------------

ROLLOUT = "actor_rollout_ref.rollout"
SERVER = "verl/workers/rollout/vllm_rollout/vllm_async_server.py"  # named by rules, hooked by no patch
WORDS = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.dtype=float16", "actor_rollout_ref.actor.fsdp_config.dtype=float16"]


def new_tree(folder: Path) -> Path:
    """Make the wheel of the release that does not exist: OLD's with another version and a line more in the server."""
    root = unpacked_wheel(OLD, folder)
    (root / VERL.version_file).write_text(f"{NEW}\n")
    (root / SERVER).write_text(f"# a new line\n{(root / SERVER).read_text()}")
    return root


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """This project's stacks and configs, and the new release: OLD's folder under its name, and an entry."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(REPO / "patches", project / "patches")
    shutil.copytree(REPO / "configs", project / "configs")
    home = VERL.home(project)
    shutil.copytree(home / f"v{OLD}", home / f"v{NEW}")
    old, root = find_release(OLD), new_tree(tmp_path_factory.mktemp("wheel"))
    entry = {"wheel_sha256": "0" * 64, "family": old.family, "dependencies": old.dependencies, "features": old.features}
    before = package_tree_id(package_blobs(root))
    release = Release(VERL, NEW, tree_before=before, tree_after=before, ported_from=OLD, **entry)
    add_release(release, home / "versions.toml")
    return project


@contextmanager
def changed(file: Path, old: str, new: str) -> Iterator[None]:
    """Replace a text of a file of the project that tests share, for a moment."""
    text = file.read_text()
    edit(file, old, new)
    try:
        yield
    finally:
        file.write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return new_tree(tmp_path / "tree")


def test_new_release_is_loaded_with_its_features(project: Path):
    new = find_release(NEW, project)
    assert list(load_releases(project)) == [*RELEASES, NEW]
    assert (new.ported_from, new.features, new.family) == (OLD, RELEASES[OLD].features, RELEASES[OLD].family)
    assert new.has("trainer_registry") and not new.has("legacy_workers")
    with pytest.raises(Refused, match=f"verl {NEW}: unknown feature 'legacy_worker' in versions.toml; known: legacy_w"):
        new.has("legacy_worker")


def test_new_release_has_the_rules_of_the_one_it_was_ported_from(project: Path, tree: Path):
    assert status(tree).release != NEW, "this project does not have it"
    diagnosis = diagnose(identify_tree(tree, project), WORDS)
    compute, weights = (diagnosis.hops[name] for name in ("actor.compute", "rollout.weights"))
    assert diagnosis.json()["verl"] == {"release": NEW, "state": "unpatched", "stack": None, "nearest": None}
    assert (compute.effective_dtype, weights.effective_dtype) == ("bfloat16", "float16")
    assert compute.reason == "workers/engine/fsdp/transformer_impl.py:397"
    assert weights.reason == f"{SERVER.removeprefix('verl/')}:327", "one line below 0.9.1's"
    assert diagnosis.verdict == "differ"

    apply(tree, project)
    diagnosis = diagnose(identify_tree(tree, project), WORDS)
    stack = load_stack(find_release(NEW, project), project).id
    assert diagnosis.json()["verl"] == {"release": NEW, "state": "patched", "stack": stack, "nearest": None}
    assert diagnosis.hops["actor.compute"].effective_dtype == "float16" and diagnosis.verdict == "agree"

    with changed(project / "configs/precision/fp16.yaml", "# @package", "# another version of the stack\n# @package"):
        outdated = identify_tree(tree, project)
    assert (outdated.state, outdated.stack) == ("patched", stack)


def test_hop_is_unknown_where_the_quoted_line_is_gone(project: Path, tree: Path):
    edit(tree / SERVER, '"dtype": self.config.dtype,', '"dtype": "bfloat16",')
    wheel_id = package_tree_id(package_blobs(tree))  # as if that were the wheel
    versions = VERL.home(project) / "versions.toml"
    with changed(versions, f'before = "{find_release(NEW, project).tree_before}"', f'before = "{wheel_id}"'):
        diagnosis = diagnose(identify_tree(tree, project), WORDS)
    assert diagnosis.json()["verl"]["release"] == NEW
    assert diagnosis.hops["rollout.weights"].effective_dtype == "unknown"
    assert diagnosis.hops["actor.compute"].effective_dtype == "bfloat16"


def test_new_release_without_rules_is_unknown(project: Path, tree: Path):
    with changed(VERL.home(project) / "versions.toml", f'ported_from = "{OLD}"', 'ported_from = ""'):
        diagnosis = diagnose(identify_tree(tree, project), [f"{ROLLOUT}.name=vllm"])
    assert diagnosis.hops["actor.compute"].reason == f"no rule for engine in verl {NEW}"
    assert diagnosis.verdict == "unknown"


def test_unknown_feature_is_refused(project: Path, tmp_path: Path):
    home = tmp_path / "patches/verl"
    home.mkdir(parents=True)
    text = (VERL.home(project) / "versions.toml").read_text()
    (home / "versions.toml").write_text(text.replace('"hf_rollout"', '"hf_rolout"', 1))
    with pytest.raises(Refused, match="verl 0.4.1: unknown feature 'hf_rolout' in versions.toml; known: "):
        load_releases(tmp_path)


def test_command_lists_the_new_release(project: Path):
    """Run the tool of a copy of this project, as a maintainer would."""
    shutil.copytree(REPO / "scripts", project / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, project / "scripts/patchset.py", "list", "--framework", "verl"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(rf"^verl {re.escape(NEW)}: family C, stack \w{{12}}, \d+ patches", done.stdout, re.M)
