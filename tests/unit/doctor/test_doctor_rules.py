"""The doctor's table of dtype rules: against the wheels, on a new release, on trees that are none; and the command."""

import json
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.diagnoses import ROLLOUT
from support.trees import edit

import doctor as command
from lib.doctor.diagnosis import Diagnosis, diagnose
from lib.doctor.dtype_rules import KNOWN, RULES
from lib.doctor.tree import identify_tree, table_release
from lib.errors import Refused
from lib.patches.apply import apply
from lib.patches.git_objects import package_blobs, package_tree_id
from lib.patches.releases import VERL, add_release, find_release, load_releases
from lib.patches.stack import load_stack
from lib.patches.wheels import unpacked_wheel, wheel
from lib.paths import REPO

RELEASES = load_releases()
OLD, NEW = "0.9.1", "0.9.2"
NEAREST = {"release": None, "state": "foreign", "stack": None, "nearest": OLD}
SERVER = "verl/workers/rollout/vllm_rollout/vllm_async_server.py"  # named by rules, hooked by no patch
WORDS = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.dtype=float16", "actor_rollout_ref.actor.fsdp_config.dtype=float16"]


def dtypes(diagnosis: Diagnosis, *names: str) -> list[str | None]:
    return [diagnosis.hops[name].effective_dtype for name in names]


@pytest.mark.parametrize("release", RELEASES)
def test_rules_fit_the_release(release: str):
    """Each quotes a line of its wheel, names a patch and a hook of its stack, and is the only one of its hop."""
    rules = [rule for rule in RULES if release in rule.lines]
    with zipfile.ZipFile(wheel(release)) as archive:
        for rule in rules:
            line = archive.read(f"verl/{rule.path}").decode().splitlines()[rule.lines[release] - 1]
            assert rule.text in line, f"{rule.path}:{rule.lines[release]}"
    stack = load_stack(RELEASES[release])
    assert {f"{rule.patch}.patch" for rule in rules if rule.patch} <= {patch.name for patch in stack.patches}
    assert {f"verl/{rule.hook}" for rule in rules if rule.hook} <= stack.after.keys()
    decided = [(rule.hop.format(role=role), rule.implementation) for rule in rules for role in rule.roles]
    assert len(decided) == len(set(decided))


def test_rules_name_only_releases_of_versions_toml():
    assert KNOWN <= set(RELEASES)
    assert {table_release(release, RELEASES) for release in RELEASES.values()} <= KNOWN
    once = replace(RELEASES[OLD], name=NEW, ported_from=OLD)
    twice = replace(once, name="0.9.3", ported_from=NEW)
    assert table_release(twice, RELEASES | {NEW: once, twice.name: twice}) == OLD


# --- a new release is one entry of versions.toml and one folder -------------------------------------------------------


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
    tree = package_tree_id(package_blobs(new_tree(tmp_path_factory.mktemp("wheel"))))
    release = replace(find_release(OLD), name=NEW, tree_before=tree, tree_after=tree, ported_from=OLD)
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


def test_new_release_has_the_rules_of_the_one_it_was_ported_from(project: Path, tree: Path):
    diagnosis = diagnose(identify_tree(tree, project), WORDS)
    assert diagnosis.json()["verl"] == {"release": NEW, "state": "unpatched", "stack": None, "nearest": None}
    assert dtypes(diagnosis, "actor.compute", "rollout.weights") == ["bfloat16", "float16"]
    assert diagnosis.hops["actor.compute"].reason == "workers/engine/fsdp/transformer_impl.py:397"
    weights = diagnosis.hops["rollout.weights"].reason
    assert weights == f"{SERVER.removeprefix('verl/')}:327", "one line below 0.9.1's"
    assert diagnosis.verdict == "differ"

    apply(tree, project)
    diagnosis = diagnose(identify_tree(tree, project), WORDS)
    stack = load_stack(find_release(NEW, project), project).id
    assert diagnosis.json()["verl"] == {"release": NEW, "state": "patched", "stack": stack, "nearest": None}
    assert dtypes(diagnosis, "actor.compute") == ["float16"] and diagnosis.verdict == "agree"

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
    assert dtypes(diagnosis, "rollout.weights", "actor.compute") == ["unknown", "bfloat16"]


def test_new_release_without_rules_is_unknown(project: Path, tree: Path):
    with changed(VERL.home(project) / "versions.toml", f'ported_from = "{OLD}"', 'ported_from = ""'):
        diagnosis = diagnose(identify_tree(tree, project), WORDS[:1])
    assert diagnosis.hops["actor.compute"].reason == f"no rule for engine in verl {NEW}"
    assert diagnosis.verdict == "unknown"


def test_unknown_feature_is_refused(project: Path):
    with pytest.raises(Refused, match=f"verl {NEW}: unknown feature 'legacy_worker' in versions.toml; known: legacy_w"):
        find_release(NEW, project).has("legacy_worker")
    with changed(VERL.home(project) / "versions.toml", '"hf_rollout"', '"hf_rolout"'):
        with pytest.raises(Refused, match="verl 0.4.1: unknown feature 'hf_rolout' in versions.toml; known: "):
            load_releases(project)


# --- trees that are no release ----------------------------------------------------------------------------------------


def test_foreign_tree_has_the_rules_of_the_nearest_release(tmp_path: Path):
    """A file that a stack hooks and rules name differs, and one that no rule names."""
    root = unpacked_wheel(OLD, tmp_path)
    for path in ("workers/engine/fsdp/transformer_impl.py", "workers/config/actor.py"):
        (root / "verl" / path).open("a").write("\n# of another commit\n")
    diagnosis = diagnose(identify_tree(root), WORDS[1:2])
    assert diagnosis.json()["verl"] == NEAREST
    assert dtypes(diagnosis, "actor.compute", "wire", "critic.master") == ["unknown"] * 3, "their file differs"
    assert dtypes(diagnosis, "rollout.weights", "hf_export") == ["float16", "bfloat16"], "their files are the release's"
    assert diagnosis.verdict == "unknown" and not diagnosis.sound
    (finding,) = (finding for finding in diagnosis.findings if finding.key == "verl")
    assert "transformer_impl.py" in finding.effect and "make drift" in finding.mend


def test_patched_files_of_a_foreign_tree_are_resolved(trees: dict[str, Path], tmp_path: Path):
    """``make port`` leaves no record, one hooked file merged with the change, and the others as patched."""
    root = Path(shutil.copytree(trees["patched"], tmp_path / "ported"))
    shutil.rmtree(root / VERL.bookkeeping)
    (root / VERL.stamp).unlink()
    (root / "verl/utils/checkpoint/fsdp_checkpoint_manager.py").open("a").write("\n# of another commit\n")
    diagnosis = diagnose(identify_tree(root), ["+precision=fp16"])
    assert diagnosis.json()["verl"] == NEAREST
    expected = ["float16", "float16", "unknown"]
    assert dtypes(diagnosis, "actor.compute", "rollout.weights", "hf_export") == expected
    assert diagnosis.verdict == "agree"


def test_changed_file_of_a_release_is_unknown(tmp_path: Path):
    """A file that no patch hooks differs: the release is identified, and the hops that the file decides are unknown."""
    root = unpacked_wheel(OLD, tmp_path)
    edit(root / SERVER, '"dtype": self.config.dtype,', '"dtype": "bfloat16",')
    diagnosis = diagnose(identify_tree(root), WORDS[:1])
    assert diagnosis.json()["verl"]["state"] == "unpatched"
    assert dtypes(diagnosis, "rollout.weights", "actor.compute") == ["unknown", "bfloat16"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_command_prints_json_and_text(trees: dict[str, Path], capsys):
    words = ["--verl", str(trees["pristine"]), f"{ROLLOUT}.dtype=float16"]
    assert command.main([*words, WORDS[2], "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"verl", "hops", "scaler", "findings", "refused", "verdict", "sentence"}
    assert printed["verdict"] == "differ" and set(printed["findings"][0]) == {"key", "value", "effect", "mend"}

    assert command.main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"verl {OLD}, unpatched")
    assert ["hop", "requested", "effective", "because"] in map(str.split, lines)
    assert ["actor.compute", "-", "bfloat16", "workers/engine/fsdp/transformer_impl.py:397"] in map(str.split, lines)
    assert ["rollout.weights", "float16", "float16"] in [line.split()[:3] for line in lines]
    assert lines[-1].startswith("differ: ") and "nobody requested" in lines[-1]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--verl", "/nowhere"], "is not a folder"),
        (["--verl", "/tmp"], "no verl/__init__.py"),
        (["actor.dtype"], "ARGS"),
        (["--args", "a='b"], "No closing quotation"),
        (["--misspelt"], "unrecognized arguments: --misspelt"),
        (["--config-name", "nothing"], "has no nothing.yaml"),
    ],
)
def test_bad_input_is_refused(words: list[str], reason: str, trees: dict[str, Path]):
    with pytest.raises(Refused) as refused:
        command.main(["--verl", str(trees["pristine"]), *words])
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_overrides_follow_those_of_args():
    assert command.parse(["a=1", "--args", "a=2 b=3", "--json", "c=4"])[1] == ["a=2", "b=3", "a=1", "c=4"]


def test_tree_is_unchanged(trees: dict[str, Path], tmp_path: Path):
    copy = shutil.copytree(trees["patched"], tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted((str(path), path.stat().st_mtime_ns) for path in copy.rglob("*"))
    assert command.main(["--verl", str(copy), "--json"]) == 0
    assert sorted((str(path), path.stat().st_mtime_ns) for path in copy.rglob("*")) == before
