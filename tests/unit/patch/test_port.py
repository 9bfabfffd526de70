"""Carrying a stack to another verl, from 0.9.0 to 0.9.1: a small stack of two files, and the project's."""

import os
import shutil
from pathlib import Path

import pytest
from support.patch_tool import message, refused, run_command
from support.small_projects import add_patches, make_project, wheel_of
from support.trees import contents, edit, git

from verl_precision.files import write
from verl_precision.patch.apply import apply
from verl_precision.patch.commits import checkout, read_commits
from verl_precision.patch.git import run_git
from verl_precision.patch.hunks import MergedHunk, reason, report
from verl_precision.patch.port import port
from verl_precision.patch.releases import VERL, find_release
from verl_precision.patch.stack import load_stack
from verl_precision.patch.status import drift
from verl_precision.patch.wheels import unpack
from verl_precision.paths import REPO

OLD, NEW = "0.9.0", "0.9.1"
ENGINE = "verl/workers/engine/fsdp/transformer_impl.py"  # differs between the two
SAME = "verl/utils/checkpoint/fsdp_checkpoint_manager.py"  # does not
MODULE = "verl/utils/precision.py"
FILES = (ENGINE, SAME)

# The changes of the small stack's patches to 0.9.0.
IMPORT = ("import logging\n", "import logging\nimport verl.utils.precision\n")
FIXED = ("optimizer, device)\n            gc.collect()\n", "optimizer, device)\n")  # as 0.9.1 has it
CHANGED = ("        if is_last_micro_batch:\n", "        if is_last_micro_batch or self.eager:\n")  # another in 0.9.1


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with both releases and four patches for the older; read it, do not change it."""
    project = make_project(tmp_path_factory.mktemp("small"), {(VERL, OLD): FILES, (VERL, NEW): FILES})
    write(project / "patches/verl/files" / MODULE, b"ANSWER = 42\n")
    patches = {
        "[fsdp] feat: import the module": {ENGINE: IMPORT, SAME: IMPORT},
        "[fsdp] fix: collect no garbage": {ENGINE: FIXED},
        "[fsdp] fix: change a condition": {ENGINE: CHANGED},
        "[ckpt] feat: import it twice": {SAME: ("import logging\n", "import logging\nimport logging\n")},
    }
    add_patches(project, OLD, [(message(subject), edits) for subject, edits in patches.items()])
    return project


@pytest.fixture(scope="module")
def smooth(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without the patch that conflicts; read it, do not change it."""
    project = shutil.copytree(small, tmp_path_factory.mktemp("smooth") / "project")
    tree = project.parent / "tree"
    assert run_command(project, "checkout", OLD, tree).returncode == 0
    git("rebase", "--quiet", "--onto", "HEAD~2", "HEAD~1", cwd=tree)
    assert "would delete 1 of the patches of verl 0.9.0" in refused(project, "export", tree, unchanged=project)
    assert run_command(project, "export", "--remove", tree).returncode == 0
    return project


@pytest.fixture
def newer(small: Path, tmp_path: Path) -> Path:
    """The newer release, unpacked."""
    return unpack(wheel_of(small, NEW), tmp_path / "newer")


def test_report_accounts_for_each_hunk(small: Path, tmp_path: Path):
    done = run_command(small, "port", OLD, NEW, tmp_path / "tree")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "making a git tree of 0.9.1",
        "making a git tree of verl 0.9.0 with its patches",
        "merged 1/4 fsdp-import-the-module.patch",
        "merged 2/4 fsdp-collect-no-garbage.patch",
        "merged 3/4 fsdp-change-a-condition.patch",
        "merged 4/4 ckpt-import-it-twice.patch",
        "committing 4 patches",
    ]
    assert done.stdout.splitlines()[:8] == [
        "verl 0.9.0 -> 0.9.1: 4 patches, 5 hunks: 2 same, 1 merged, 1 present, 1 conflict",
        "merged   fsdp-import-the-module.patch: 1 same, 1 merged",
        f"    merged   {ENGINE}: 1",
        "present  fsdp-collect-no-garbage.patch: 1 present",
        f"    present  {ENGINE}: line 834 in def to(self, device: str, model: bool = True, optimizer: bool = True, "
        "grad: bool",
        "conflict fsdp-change-a-condition.patch: 1 conflict",
        f"    conflict {ENGINE}: line 683 in def _gradient_sync_context(self, *, is_last_micro_batch: bool): "
        "1 of its 1 old lines are gone, first: if is_last_micro_batch:",
        "same     ckpt-import-it-twice.patch: 1 same",
    ]
    assert f"{tmp_path / 'tree'}: 2 of 4 patches committed, after the tag base/0.9.1" in done.stdout
    assert "fsdp-change-a-condition.patch has conflicts" in done.stdout


def test_patch_that_upstream_has_is_dropped(smooth: Path, newer: Path, tmp_path: Path):
    """The release that it is carried to is identified by its content."""
    project = shutil.copytree(smooth, tmp_path / "project")
    done = run_command(project, "port", OLD, newer, tmp_path / "tree")
    assert done.returncode == 0
    assert run_command(project, "export", tmp_path / "tree").returncode == 0
    made = (project / "patches/verl/v0.9.1/series").read_text().split()
    assert made == ["fsdp-import-the-module.patch", "ckpt-import-it-twice.patch"]
    # Where a patch's files are the same, so is the patch, to the byte.
    old, new = ((project / f"patches/verl/v{release}" / made[1]).read_bytes() for release in (OLD, NEW))
    assert old == new
    assert run_command(project, "check", "--release", NEW).returncode == 0


def test_resolved_conflict_lets_the_rest_be_carried(small: Path, newer: Path, tmp_path: Path):
    project, tree = shutil.copytree(small, tmp_path / "project"), tmp_path / "tree"
    run_command(project, "port", OLD, NEW, tree)
    assert git("diff", "--name-only", "--diff-filter=U", cwd=tree).split() == [ENGINE]
    git("add", ENGINE, cwd=tree)
    git("commit", "-m", message("[fsdp] fix: change a condition"), cwd=tree)  # and no --continue: the tree is clean
    unfinished = f"cherry-pick to finish: git -C {tree} cherry-pick --continue"
    assert unfinished in refused(project, "export", tree, unchanged=project)
    git("cherry-pick", "--continue", cwd=tree)
    marked = "'[fsdp] fix: change a condition' has a conflict marker, <<<<<<<"
    assert marked in refused(project, "export", tree, unchanged=project)
    git("checkout", "HEAD~2", ENGINE, cwd=tree)
    edit(tree / ENGINE, "if is_last_micro_batch or not defer_sync:", "if is_last_micro_batch or self.eager:")
    git("commit", "-a", "--fixup", "HEAD~1", cwd=tree)
    git("-c", "sequence.editor=true", "rebase", "--quiet", "--interactive", "--autosquash", "base/0.9.1", cwd=tree)
    assert run_command(project, "export", tree).returncode == 0
    made = (project / "patches/verl/v0.9.1/series").read_text().split()
    assert made == ["fsdp-import-the-module.patch", "fsdp-change-a-condition.patch", "ckpt-import-it-twice.patch"]
    # From now on the newer release has the closer stack.
    edit(newer / ENGINE, "\n", "\n# of a fork\n")
    assert drift(newer, project)[0] == "closest to verl 0.9.1: 1 of the 2 files that its patches change differ"


def test_renamed_file_is_followed_and_missing_file_conflicts(smooth: Path, newer: Path, tmp_path: Path):
    (newer / ENGINE).rename(newer / "verl/workers/engine/fsdp/moved.py")
    (newer / SAME).unlink()
    (newer / "verl/.#lock").symlink_to("nowhere")
    os.mkfifo(newer / "verl/pipe")
    before = contents(newer)
    done = run_command(smooth, "port", OLD, newer, tmp_path / "tree")
    assert done.returncode == 1 and contents(newer) == before and "which no patch changes" not in done.stdout
    assert f"    merged   {ENGINE} -> verl/workers/engine/fsdp/moved.py: 1\n" in done.stdout
    assert f"    conflict {SAME}: line 16: there is no such file\n" in done.stdout
    assert f"is not a release, so they cannot be exported; to use them: PYTHONPATH={tmp_path / 'tree'}" in done.stdout
    (name,) = git("tag", cwd=tmp_path / "tree").split()
    assert name.startswith("base/0.9.1+")
    assert "import verl.utils.precision" in (tmp_path / "tree/verl/workers/engine/fsdp/moved.py").read_text()


def test_file_that_only_moved_is_merged(smooth: Path, newer: Path, tmp_path: Path):
    (newer / SAME).rename(newer / "verl/utils/checkpoint/moved.py")
    done = run_command(smooth, "port", OLD, newer, tmp_path / "tree")
    assert f"    merged   {SAME} -> verl/utils/checkpoint/moved.py: 1\n" in done.stdout and "same" not in done.stdout


def test_survey_names_what_no_merge_shows(smooth: Path, newer: Path, tmp_path: Path):
    """New files that do what hooked ones do."""
    write(newer / "verl/workers/engine/other.py", b"loss.backward()\noptimizer.step()\n")
    write(newer / "verl/utils/plain.py", b"def f(): pass\ndef g(): pass\n")
    shown = run_command(smooth, "port", OLD, newer, tmp_path / "tree").stdout
    assert "which no patch changes: 1\n    verl/workers/engine/other.py\n" in shown


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((OLD, OLD), "0.9.0 is verl 0.9.0 itself"),
        ((OLD, "master"), "master is neither a release (0.9.0, 0.9.1, or a newer one on PyPI) nor a folder"),
        (
            (OLD, "patched"),
            "patched contains verl/utils/precision.py already; remove the patches first: make unapply",
        ),
        ((OLD, NEW, "newer"), "newer exists and is not an empty folder"),
        ((OLD, "newer", "newer/verl/new"), "DIR=newer/verl/new is inside the package of newer"),
    ],
)
def test_bad_input_is_refused(small: Path, newer: Path, tmp_path: Path, args: tuple[str, ...], named: str):
    if "patched" in args:
        apply(unpack(wheel_of(small, OLD), tmp_path / "patched"), small)
    words = (*args, "tree")[:3]
    assert named in refused(small, "port", *words, unchanged=tmp_path, cwd=tmp_path)


@pytest.mark.parametrize(
    ("hunk", "ours", "why"),
    [
        ("-  a\n+  b\n c\n", "b\nc\n", "its new lines are in the file, here or elsewhere"),
        ("-  a\n+  b\n c\n", "a\nc\n", "its lines, or those around them, changed"),
        ("-  a\n c\n", "c\n", "1 of its 1 old lines are gone, first: a"),
    ],
)
def test_conflict_has_a_reason(hunk: str, ours: str, why: str):
    assert reason(f"@@ -1,2 +1,2 @@\n{hunk}", ours) == why


def test_patch_that_upstream_has_in_part_is_merged(small: Path):
    stack = load_stack(find_release(OLD, small), small)
    merged = [MergedHunk(ENGINE, "line 1", "present"), MergedHunk(SAME, "line 1", "same")]
    assert "merged   fsdp-import-the-module.patch: 1 same, 1 present" in report(stack, NEW, {stack.patches[0]: merged})


def test_drift_lists_changed_files_by_patch(small: Path, newer: Path):
    (newer / SAME).unlink()
    before = contents(newer)
    done = run_command(small, "drift", newer)
    assert (done.returncode, done.stderr) == (0, "") and contents(newer) == before
    assert done.stdout.splitlines()[:6] == [
        "closest to verl 0.9.0: 2 of the 2 files that its patches change differ",
        "fsdp-import-the-module.patch: 2 of 2 files",
        f"    gone     {SAME}",
        f"    changed  {ENGINE}",
        "fsdp-collect-no-garbage.patch: 1 of 1 files",
        f"    changed  {ENGINE}",
    ]


def test_patched_release_has_no_drift(small: Path, tmp_path: Path):
    older = unpack(wheel_of(small, OLD), tmp_path / "older")
    apply(older, small)
    assert drift(older, small) == ["closest to verl 0.9.0: 0 of the 2 files that its patches change differ"]


# The files whose conflicts were resolved by hand, by patch.
DECIDED = {
    "[cfg] feat: add one dtype key per role": ["verl/workers/config/actor.py", "verl/workers/config/engine.py"],
    "[ckpt] fix: resume from a whole checkpoint": [
        "verl/trainer/ppo/v1/trainer_base.py",
        "verl/utils/checkpoint/checkpoint_manager.py",
    ],
    "[trainer] feat: save a checkpoint after a storm": ["verl/trainer/sft_trainer.py"],
    "[rollout] feat: keep routers and the head in fp32": ["verl/workers/rollout/vllm_rollout/vllm_async_server.py"],
    "[rollout] fix: offload the base under LoRA before the rollout wakes": ["verl/workers/engine_workers.py"],
}


@pytest.mark.subprocess
def test_worked_example_gives_the_stack_of_0_9_1(tmp_path: Path):
    tree, shipped = tmp_path / "tree", tmp_path / "shipped"
    lines, whole = port(OLD, NEW, tree)
    checkout(NEW, shipped)
    git("fetch", "--quiet", "--no-tags", str(shipped), "stack:shipped", cwd=tree)
    decided = {}
    while conflicts := git("diff", "--name-only", "--diff-filter=U", cwd=tree).split():
        subject = git("log", "-1", "--format=%s", "CHERRY_PICK_HEAD", cwd=tree).strip()
        decided[subject] = conflicts
        answer = git("log", "-1", "--format=%h", "--fixed-strings", f"--grep={subject}", "shipped", cwd=tree).strip()
        git("checkout", answer, "--", *conflicts, cwd=tree)
        run_git("-c", "core.editor=true", "cherry-pick", "--continue", cwd=tree)
    assert decided == DECIDED and not whole
    *ported, own = load_stack(find_release(NEW)).patches
    assert list(read_commits(tree)[2]) == ported
    assert own.name == "rollout-load-lora-adapters-into-vllm-0-29.patch", "for code that 0.9.0 does not have"
    # The report names these files by patch, and the resulting conflicts.
    reported = {line.split()[1].rstrip(":") for line in lines if line.startswith("    conflict ")}
    assert reported == {path for paths in DECIDED.values() for path in paths}
    document = (REPO / "docs/how-to/fork.md").read_text()
    shown = document.partition("$ make port FROM=0.9.0 TO=0.9.1\n")[2].partition("\n```")[0].splitlines()
    assert [line for line in shown if line.strip() != "…" and line not in lines] == []
