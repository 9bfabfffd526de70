"""The doctor's table of dtype rules, the trees that it is applied to, the command, and the Python that runs it."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.diagnoses import ROLLOUT
from support.trees import edit

from verl_precision import make
from verl_precision.commands import doctor as command
from verl_precision.doctor.diagnosis import SOUND, Diagnosis, diagnose
from verl_precision.doctor.dtype_rules import KNOWN, RULES
from verl_precision.doctor.fp8_rollouts import FP8_UTILS, LIMITS, Limit, fitting, fp8_limit
from verl_precision.doctor.interpreter import environment_python, missing
from verl_precision.doctor.tree import identify_tree, table_release
from verl_precision.errors import Refused
from verl_precision.facts import packages
from verl_precision.patch.apply import apply
from verl_precision.patch.git_objects import package_blobs, package_tree_id
from verl_precision.patch.releases import VERL, add_release, find_release, load_releases
from verl_precision.patch.stack import load_stack
from verl_precision.patch.wheels import unpacked_wheel, wheel
from verl_precision.paths import PACKAGE, PROGRAM, REPO

RELEASES = load_releases()
OLD, NEW = "0.9.1", "0.9.2"
NEAREST = {"release": None, "state": "foreign", "stack": None, "nearest": OLD}
SERVER = "verl/workers/rollout/trtllm_rollout/trtllm_async_server.py"  # named by rules, hooked by no patch
SITE = Path(os.__file__).relative_to(sys.base_prefix).parent / "site-packages"
WORDS = [f"{ROLLOUT}.name=trtllm", f"{ROLLOUT}.dtype=float16", "actor_rollout_ref.actor.fsdp_config.dtype=float16"]


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


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{limit.release}:{limit.line}")
def test_limits_of_fp8_rollouts_quote_their_release(limit: Limit):
    with zipfile.ZipFile(wheel(limit.release)) as archive:
        assert limit.text in archive.read(f"verl/{FP8_UTILS}").decode().splitlines()[limit.line - 1]


@pytest.mark.parametrize(
    ("release", "fits", "fails"),
    [
        ("0.7.0", "0.8.5 0.11.0 0.13.0", "0.14.0 0.19.1 0.24.0 0.28.0+cpu"),
        ("0.7.1", "0.12.0 0.14.0 0.19.1", "0.20.0 0.23.0 0.24.0"),
        ("0.8.0", "0.12.0 0.19.1", "0.20.2 0.24.0 1.0.0"),
        ("0.9.1", "0.18.0 0.24.0 0.28.0 1.0.0", "0.8.5 0.17.0"),
        ("0.6.1", "0.10.0 0.24.0", ""),
        ("0.9.1", "unknown", ""),
    ],
)
def test_fp8_rollouts_are_limited_by_the_version_of_vllm(release: str, fits: str, fails: str):
    for version in fits.split():
        assert fp8_limit(release, version) is None
    for version in fails.split():
        assert fp8_limit(release, version).release == release
    if fails:
        assert fitting(release) == {"0.7.0": "vLLM below 0.14", "0.9.1": "vLLM 0.18 or later"}.get(
            release, "vLLM below 0.20"
        )


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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """This project's stacks and configs, and the new release: OLD's folder under its name, and an entry."""
    project = tmp_path / "project"
    shutil.copytree(REPO / "patches", project / "patches")
    shutil.copytree(REPO / "configs", project / "configs")
    home = VERL.home(project)
    shutil.copytree(home / f"v{OLD}", home / f"v{NEW}")
    tree = package_tree_id(package_blobs(new_tree(tmp_path / "wheel")))
    release = replace(find_release(OLD), name=NEW, tree_before=tree, tree_after=tree, ported_from=OLD)
    add_release(release, home / "versions.toml")
    return project


@pytest.mark.parametrize("fixes", [False, True])
def test_edit_of_another_file_leaves_those_of_either_series_known(fixes: bool, tmp_path: Path):
    root = unpacked_wheel(OLD, tmp_path)
    apply(root, fixes=fixes)
    with (root / "verl/protocol.py").open("a") as file:
        file.write("# mine\n")
    tree = identify_tree(root)
    assert tree.state == "patched" and "unknown" not in tree.files.values()
    assert tree.advice == "edited: verl/protocol.py, which no patch changes"
    assert tree.apply_command.endswith(" FIXES=yes") == fixes


@pytest.mark.subprocess
def test_new_release_has_the_rules_of_the_one_it_was_ported_from(project: Path, tmp_path: Path):
    tree = new_tree(tmp_path / "tree")
    diagnosis = diagnose(identify_tree(tree, project), WORDS)
    assert diagnosis.json()["verl"] == {"release": NEW, "state": "unpatched", "stack": None, "nearest": None}
    assert dtypes(diagnosis, "actor.compute", "rollout.weights") == ["bfloat16", "float16"]
    assert diagnosis.hops["actor.compute"].reason == "workers/engine/fsdp/transformer_impl.py:397"
    weights = diagnosis.hops["rollout.weights"].reason
    assert weights == f"{SERVER.removeprefix('verl/')}:228", "one line below 0.9.1's"
    assert diagnosis.verdict == "differ"

    apply(tree, project)
    diagnosis = diagnose(identify_tree(tree, project), WORDS)
    stack = load_stack(find_release(NEW, project), project).id
    assert diagnosis.json()["verl"] == {"release": NEW, "state": "patched", "stack": stack, "nearest": None}
    assert dtypes(diagnosis, "actor.compute") == ["float16"] and diagnosis.verdict == "agree"

    edit(project / "configs/precision/fp16.yaml", "# @package", "# another version of the stack\n# @package")
    outdated = identify_tree(tree, project)
    assert (outdated.state, outdated.stack) == ("patched", stack)


@pytest.mark.subprocess
def test_hop_is_unknown_where_the_quoted_line_or_all_rules_are_gone(project: Path, tmp_path: Path):
    tree = new_tree(tmp_path / "tree")
    edit(tree / SERVER, '"dtype": self.config.dtype,', '"dtype": "bfloat16",')
    wheel_id = package_tree_id(package_blobs(tree))  # as if that were the wheel
    versions = VERL.home(project) / "versions.toml"
    edit(versions, f'before = "{find_release(NEW, project).tree_before}"', f'before = "{wheel_id}"')
    diagnosis = diagnose(identify_tree(tree, project), WORDS)
    assert diagnosis.json()["verl"]["release"] == NEW
    assert dtypes(diagnosis, "rollout.weights", "actor.compute") == ["unknown", "bfloat16"]

    edit(versions, f'ported_from = "{OLD}"', 'ported_from = ""')
    diagnosis = diagnose(identify_tree(tree, project), WORDS[:1])
    assert diagnosis.hops["actor.compute"].reason == f"no rule for engine in verl {NEW}"
    assert diagnosis.verdict == "unknown"


def test_unknown_feature_is_refused(project: Path):
    edit(VERL.home(project) / "versions.toml", '"hf_rollout"', '"hf_rolout"')
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
    shown = command.text(diagnosis)
    assert shown.startswith(f"this verl (nearest release {OLD}), dirty, in {root}\n\ndirty: verl {OLD} except verl/")
    assert dtypes(diagnosis, "actor.compute", "wire", "critic.master") == ["unknown"] * 3, "their file differs"
    assert dtypes(diagnosis, "rollout.weights", "hf_export") == ["float16", "bfloat16"], "their files are the release's"
    assert diagnosis.verdict == "unknown" and diagnosis.verdict not in SOUND
    (finding,) = (finding for finding in diagnosis.findings if finding.key == "verl")
    assert "transformer_impl.py" in finding.effect and "make drift" in finding.fix


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
    assert f"\n\nedited: {SERVER}, which no patch changes\n" in command.text(diagnosis)
    assert dtypes(diagnosis, "rollout.weights", "actor.compute") == ["unknown", "bfloat16"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_command_prints_json_and_text(trees: dict[str, Path], capsys):
    words = ["--verl", str(trees["pristine"]), f"{ROLLOUT}.dtype=float16"]
    assert command.main([*words, WORDS[2], "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    keys = {"verl", "hops", "scaler", "deterministic", "findings"}
    assert set(printed) == keys | {"refused", "verdict", "sentence", "hardware"}
    assert printed["verdict"] == "differ" and set(printed["findings"][0]) == {"key", "value", "effect", "fix"}

    assert command.main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"verl {OLD}, unpatched")
    assert ["hop", "requested", "effective", "because"] in map(str.split, lines)
    assert ["actor.compute", "-", "bfloat16", "workers/engine/fsdp/transformer_impl.py:397"] in map(str.split, lines)
    assert ["rollout.weights", "float16", "float16"] in [line.split()[:3] for line in lines]
    assert lines[-1].startswith("differ: ") and "without a request" in lines[-1]


def test_bad_input_is_refused(trees: dict[str, Path]):
    reasons = {"--verl /": "no verl/__init__.py", "actor.dtype": "ARGS", "--config-name nothing": "has no nothing.yaml"}
    reasons |= dict.fromkeys(["--precision fp16", "--precision=fp16"], "a group: give +precision=fp16")
    for words, reason in reasons.items():
        with pytest.raises(Refused) as refused:
            command.main(["--verl", str(trees["pristine"]), *words.split()])
        assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_overrides_follow_those_of_args():
    assert command.parse(["a=1", "--args", "a=2 b=3", "--json", "c=4"])[1] == ["a=2", "b=3", "a=1", "c=4"]


@pytest.mark.subprocess
def test_tree_is_unchanged(trees: dict[str, Path], tmp_path: Path):
    copy = shutil.copytree(trees["patched"], tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted((str(path), path.stat().st_mtime_ns) for path in copy.rglob("*"))
    assert command.main(["--verl", str(copy), "--json"]) == 0
    assert sorted((str(path), path.stat().st_mtime_ns) for path in copy.rglob("*")) == before


# --- the Python that runs it, in which nothing may be installed -------------------------------------------------------


@pytest.fixture(scope="module")
def environments(trees, tmp_path_factory) -> dict[str, Path]:
    """The site-packages of two environments with only verl; ``whole`` also finds this environment's packages."""
    made = {}
    for name in ("whole", "bare"):
        folder = tmp_path_factory.mktemp(name)
        venv.create(folder, symlinks=True)
        made[name] = folder / SITE
        shutil.copytree(trees["pristine"] / "verl", made[name] / "verl")
    (hydra,) = packages.importlib.util.find_spec("hydra").submodule_search_locations
    (made["whole"] / "packages.pth").write_text(str(Path(hydra).parent))
    return made


@pytest.mark.subprocess
def test_environment_of_the_verl_is_used(environments):
    verl = environments["whole"]
    line = [*PROGRAM, "make", "doctor", f"VERL={verl}", f"ARGS={WORDS[1]}"]
    done = subprocess.run(line, cwd=REPO, capture_output=True, text=True)
    here = [*PROGRAM, "doctor", "--verl", str(verl), WORDS[1]]
    assert done.stdout == subprocess.run(here, cwd=REPO, capture_output=True, text=True).stdout
    assert f"unpatched, in {verl}" in done.stdout and done.returncode == 1
    for folder in (verl, verl / "verl"):
        assert environment_python(folder) == str(verl.parents[2] / "bin/python3")


def test_named_python_comes_before_that_of_the_verl_and_that_of_this_checkout(environments, trees, monkeypatch):
    bare, named, tried = environments["bare"], sys.executable, []
    monkeypatch.setattr(make.setup_env, "setup", lambda *_, patch: tried.append(patch) or "of .venv")
    for values, typed, expected in (
        ({"VERL": bare}, True, named),
        ({}, True, named),
        ({"VERL": bare}, False, str(bare.parents[2] / "bin/python3")),
        ({"VERL": trees["pristine"]}, False, "of .venv"),  # a tree without a Python
        ({}, False, "of .venv"),
    ):
        assert make.interpreter("doctor", values, "cpu", named, typed) == expected
    assert tried == [False, True], "another verl is examined than that of .venv"
    with pytest.raises(Refused, match="^PYTHON=/no/such/file: no such program$"):
        make.interpreter("doctor", {}, "cpu", "/no/such/file", True)


def test_missing_packages_are_named(trees, monkeypatch):
    assert missing(trees["pristine"]) == missing(trees["patched"]) == []
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    assert missing(trees["pristine"]) == []
    assert missing(trees["patched"]) == ["torch (for a patched verl)"]


def test_script_names_packages_that_its_python_lacks(environments):
    python = environments["bare"].parents[2] / "bin/python"
    words = ["+precision=fp16", "a=[b]", "c=d e"]
    done = subprocess.run([python, PACKAGE, "doctor", *words], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    site, install = environments["bare"], f"{python} -m pip install hydra-core omegaconf"
    again = f"""make doctor VERL={site} PYTHON=/path/to/python3 ARGS='+precision=fp16 a=[b] "c=d e"'"""
    line = f"{python} lacks hydra-core, omegaconf: {install}, or give another Python: {again}\n"
    assert done.stderr == f"verl-precision doctor: {line}"
