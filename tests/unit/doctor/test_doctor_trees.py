"""The doctor on trees that are not releases, on bad input, and as a command."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import doctor as command
from lib.doctor.diagnosis import Diagnosis, diagnose
from lib.doctor.tree import identify_tree
from lib.errors import Refused
from lib.patches.releases import VERL
from lib.patches.wheels import unpacked_wheel
from lib.paths import REPO

RELEASE = "0.9.1"
NEAREST = {"release": None, "state": "foreign", "stack": None, "nearest": RELEASE}
ROLLOUT = "actor_rollout_ref.rollout"


def dtypes(diagnosis: Diagnosis, *names: str) -> list[str | None]:
    return [diagnosis.hops[name].effective_dtype for name in names]


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """The release with a change in a file that a stack hooks and rules name, and in one that no rule names."""
    root = unpacked_wheel(RELEASE, tmp_path / "foreign")
    for path in ("workers/engine/fsdp/transformer_impl.py", "workers/config/actor.py"):
        file = root / "verl" / path
        file.write_text(file.read_text() + "\n# of another commit\n")
    return root


def test_foreign_tree_has_the_rules_of_the_nearest_release(foreign: Path):
    diagnosis = diagnose(identify_tree(foreign), [f"{ROLLOUT}.dtype=float16"])
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
    manager = root / "verl/utils/checkpoint/fsdp_checkpoint_manager.py"
    manager.write_text(manager.read_text() + "\n# of another commit\n")
    diagnosis = diagnose(identify_tree(root), ["+precision=fp16"])
    assert diagnosis.json()["verl"] == NEAREST
    expected = ["float16", "float16", "unknown"]
    assert dtypes(diagnosis, "actor.compute", "rollout.weights", "hf_export") == expected
    assert diagnosis.verdict == "agree"


def test_changed_file_of_a_release_is_unknown(tmp_path: Path):
    """A file that no patch hooks differs: the release is identified, and the hops that the file decides are unknown."""
    root = unpacked_wheel(RELEASE, tmp_path)
    server = root / "verl/workers/rollout/vllm_rollout/vllm_async_server.py"
    server.write_text(server.read_text().replace('"dtype": self.config.dtype,', '"dtype": "bfloat16",'))
    diagnosis = diagnose(identify_tree(root), [f"{ROLLOUT}.name=vllm"])
    assert diagnosis.json()["verl"]["state"] == "unpatched"
    assert dtypes(diagnosis, "rollout.weights", "actor.compute") == ["unknown", "bfloat16"]


def test_command_prints_json_and_text(trees: dict[str, Path], capsys):
    words = ["--verl", str(trees["pristine"]), f"{ROLLOUT}.dtype=float16"]
    asked = [*words, "actor_rollout_ref.actor.fsdp_config.dtype=float16", "--json"]
    done = subprocess.run([sys.executable, REPO / "scripts/doctor.py", *asked], capture_output=True, text=True)
    printed = json.loads(done.stdout)
    assert done.returncode == 1 and done.stderr == "" and printed["verdict"] == "differ"
    assert set(printed) == {"verl", "hops", "scaler", "findings", "refused", "verdict", "sentence"}
    assert set(printed["findings"][0]) == {"key", "value", "effect", "mend"}

    assert command.main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"verl {RELEASE}, unpatched")
    assert ["hop", "requested", "effective", "because"] in map(str.split, lines)
    assert ["actor.compute", "-", "bfloat16", "workers/engine/fsdp/transformer_impl.py:397"] in map(str.split, lines)
    assert ["rollout.weights", "float16", "float16"] in [line.split()[:3] for line in lines]
    assert lines[-1].startswith("differ: ") and "nobody requested" in lines[-1]


def test_bad_input_ends_in_one_line():
    script = [sys.executable, REPO / "scripts/doctor.py"]
    done = subprocess.run([*script, "--verl", "/nowhere"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("doctor: ") and "is not a folder" in done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--verl", "/tmp"], "no verl/__init__.py"),
        (["actor.dtype"], "ARGS"),
        (["--args", "a='b"], "No closing quotation"),
        (["--misspelt"], "unrecognized arguments: --misspelt"),
        (["--config-name", "nothing"], "has no nothing.yaml"),
    ],
)
def test_bad_input_is_refused(words: list[str], reason: str, trees: dict[str, Path]):
    with pytest.raises(Refused) as refused:
        command.main(words if "--verl" in words else ["--verl", str(trees["pristine"]), *words])
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_overrides_follow_those_of_args():
    assert command.parse(["a=1", "--args", "a=2 b=3", "--json", "c=4"])[1] == ["a=2", "b=3", "a=1", "c=4"]


@pytest.mark.parametrize("state", ["pristine", "patched"])
def test_tree_is_unchanged(state: str, trees: dict[str, Path], tmp_path: Path):
    copy = shutil.copytree(trees[state], tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted((str(path), path.stat().st_mtime_ns) for path in copy.rglob("*"))
    assert command.main(["--verl", str(copy), "--json"]) == 0
    assert sorted((str(path), path.stat().st_mtime_ns) for path in copy.rglob("*")) == before
