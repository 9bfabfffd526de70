"""Carrying a changed patch of 0.9.1 to 0.9.0, on two files; one is the same in both."""

import shutil
from pathlib import Path

import pytest
from support.patch_tool import message, refused, run_command
from support.small_projects import ARGS, EXPLORATION, FILES_OF_OAT, OAT_NEWER, OAT_RELEASE, add_patches, make_project
from support.trees import commit, contents, edit, git, make_repository

from verl_precision.patch.releases import OAT, VERL

OLD, NEW = "0.9.0", "0.9.1"
ENGINE = "verl/workers/engine/fsdp/transformer_impl.py"  # differs between the two
SAME = "verl/utils/checkpoint/fsdp_checkpoint_manager.py"  # does not
IMPORT, LATER = "fsdp-import-the-module", "ckpt-import-it-twice"
HOOK = "import logging\nimport verl.utils.precision\n"
CHANGED = f"{HOOK}# why\n"
OAT_IMPORT = ("import torch\n", "import torch\nimport oat.utils.precision\n")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with two patches for each release, the second below the first, committed; read it."""
    folder = tmp_path_factory.mktemp("carry")
    releases = dict.fromkeys(((VERL, OLD), (VERL, NEW)), (ENGINE, SAME))
    releases |= dict.fromkeys(((OAT, OAT_RELEASE), (OAT, OAT_NEWER)), FILES_OF_OAT)
    project = make_project(folder, releases)
    first = {path: ("import logging\n", HOOK) for path in (ENGINE, SAME)}
    second = {SAME: ("import os\n", "import os\nimport os\n")}
    for release in (OLD, NEW):
        texts = (message("[fsdp] feat: import the module"), message("[ckpt] feat: import it twice"))
        add_patches(project, release, zip(texts, (first, second), strict=True))
    for release, reason in ((OAT_RELEASE, "pending"), (OAT_NEWER, "local")):
        texts = [(message("[args] feat: import it", Reason=reason), dict.fromkeys((ARGS, EXPLORATION), OAT_IMPORT))]
        add_patches(project, release, texts, "--framework", "oat")
    (project / ".gitignore").write_text("__pycache__/\n.cache/\n")
    make_repository(project)
    return project


@pytest.fixture
def project(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "project")


def change(
    project: Path,
    tree: Path,
    edits: dict[str, tuple[str, str]],
    number: int = 0,
    text: str = "",
    name: str = NEW,
    options: tuple[str, ...] = (),
) -> None:
    """Change patch ``number`` of a release by these edits, and its message to ``text``, and export."""
    framework = "oat" if name == OAT_NEWER else "verl"
    assert run_command(project, "checkout", "--framework", framework, name, tree).returncode == 0
    ids = git("rev-list", "--reverse", f"base/{name}..stack", cwd=tree).split()
    git("checkout", "--quiet", "--detach", ids[number], cwd=tree)
    for path, (old, new) in edits.items():
        edit(tree / path, old, new)
    git("commit", "--quiet", "--all", "--amend", *([f"--message={text}"] if text else ["--no-edit"]), cwd=tree)
    git("rebase", "--quiet", "--onto", "HEAD", ids[number], "stack", cwd=tree)
    assert run_command(project, "export", *options, tree).returncode == 0


def carried(project: Path, release: str, name: str) -> str:
    return (project / f"patches/verl/v{release}/{name}.patch").read_text()


def test_change_is_carried_and_exported(project: Path, tmp_path: Path):
    text = message("[fsdp] feat: import the module", Origin="elsewhere")
    change(project, tmp_path / "tree", {path: (HOOK, CHANGED) for path in (ENGINE, SAME)}, text=text)
    done = run_command(project, "carry", IMPORT, NEW, tmp_path / "hand")
    assert (done.returncode, done.stderr) == (0, "") and not (tmp_path / "hand").exists()
    assert f"{IMPORT}.patch of verl 0.9.1: carried to 1 of 1 releases" in done.stdout
    made = carried(project, OLD, IMPORT)
    assert made.count("+# why\n") == 2 and "Origin: elsewhere" in made
    assert carried(project, OLD, LATER) == carried(project, NEW, LATER)  # the later patch follows
    assert run_command(project, "check", "--release", OLD).returncode == 0
    # Again: it is there.
    before = contents(project / "patches")
    assert run_command(project, "carry", IMPORT, NEW, tmp_path / "hand").returncode == 0
    assert contents(project / "patches") == before


def test_patch_that_the_change_contains_is_deleted(project: Path, tmp_path: Path):
    change(project, tmp_path / "tree", {SAME: ("import os\n", "import os\nimport os\n")}, options=("--remove",))
    line = refused(project, "carry", LATER, NEW, tmp_path / "hand", unchanged=tmp_path)
    assert f"PATCH={LATER}.patch: the series of verl 0.9.1 has no such patch, only {IMPORT}.patch" in line
    done = run_command(project, "carry", IMPORT, NEW, tmp_path / "hand")
    assert (done.returncode, done.stderr) == (0, "") and f"deleted {LATER}.patch" in done.stdout
    assert (project / f"patches/verl/v{OLD}/series").read_text() == f"{IMPORT}.patch\n"


def test_change_for_oat_keeps_another_message(project: Path, tmp_path: Path):
    edits = {path: (OAT_IMPORT[1], f"{OAT_IMPORT[1]}# why\n") for path in (ARGS, EXPLORATION)}
    text = message("[args] feat: import it", Origin="elsewhere")
    change(project, tmp_path / "tree", edits, text=text, name=OAT_NEWER)
    done = run_command(project, "carry", "--framework", "oat", "args-import-it", OAT_NEWER, tmp_path / "hand")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"oat {OAT_RELEASE}: its own message of args-import-it.patch is kept; edit that by hand\n" in done.stdout
    made = (project / f"patches/oat/v{OAT_RELEASE}/args-import-it.patch").read_text()
    assert made.count("+# why\n") == 2 and "Reason: pending" in made and "elsewhere" not in made
    assert run_command(project, "check", "--framework", "oat", "--release", OAT_RELEASE).returncode == 0


def test_conflict_is_named_and_left_in_a_tree(project: Path, tmp_path: Path):
    old = project.parent / "old"
    assert run_command(project, "checkout", OLD, old).returncode == 0
    edit(old / SAME, HOOK, "import logging\nimport verl.utils.precision as mine\n")
    git("commit", "--quiet", "--all", "--fixup=HEAD~1", cwd=old)
    git("-c", "sequence.editor=true", "rebase", "--quiet", "-i", "--autosquash", f"base/{OLD}", cwd=old)
    assert run_command(project, "export", old).returncode == 0
    commit(project, "another hook")
    change(project, tmp_path / "tree", {SAME: (HOOK, "import logging\nimport verl.utils.precision as ours\n")})
    before = contents(project)
    done = run_command(project, "carry", f"{IMPORT}.patch", NEW, tmp_path / "hand")
    tree = tmp_path / "hand" / OLD
    assert (done.returncode, done.stderr) == (1, "") and contents(project) == before
    stopped = f"stopped at [fsdp] feat: import the module: {SAME}\n"
    assert f"verl 0.9.0: not exported; finish in {tree}, {stopped}" in done.stdout
    git("checkout", "--theirs", SAME, cwd=tree)
    git("add", SAME, cwd=tree)
    git("-c", "core.editor=true", "rebase", "--continue", cwd=tree)
    assert run_command(project, "export", tree).returncode == 0
    assert "+import verl.utils.precision as ours" in carried(project, OLD, IMPORT)


def test_unfit_changes_are_refused(project: Path, tmp_path: Path):
    hand = tmp_path / "hand"
    assert "is as in git's HEAD; change it" in refused(project, "carry", IMPORT, NEW, hand, unchanged=tmp_path)
    line = refused(project, "carry", "nothing", NEW, hand, unchanged=tmp_path)
    assert "PATCH=nothing.patch: the series of verl 0.9.1 has no such patch, only " in line
    change(project, tmp_path / "tree", {SAME: (HOOK, CHANGED)})
    change(project, tmp_path / "tree-2", {SAME: ("import os\nimport os\n", "import os\n# twice\nimport os\n")}, 1)
    line = refused(project, "carry", LATER, NEW, hand, unchanged=tmp_path)
    assert "a patch that precedes it changed too; carry and commit that first" in line
    dropped = tmp_path / "dropped"
    assert run_command(project, "checkout", NEW, dropped).returncode == 0
    git("rebase", "--quiet", "--onto", f"base/{NEW}", "stack~1", "stack", cwd=dropped)
    assert run_command(project, "export", dropped, "--remove").returncode == 0
    line = refused(project, "carry", LATER, NEW, hand, unchanged=tmp_path)
    assert "a patch that precedes it changed too" in line, "it was removed"
    shutil.rmtree(project / ".git")
    assert "to compare with; commit the patches first" in refused(
        project, "carry", IMPORT, NEW, hand, unchanged=tmp_path
    )
