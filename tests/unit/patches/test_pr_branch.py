"""Branches for upstream, on a repository created from the wheel of 0.9.1 with its own hooks and scripts."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.trees import commit, contents, edit, git, make_repository, write_files

from lib.errors import Refused
from lib.files import write
from lib.patches import upstream
from lib.patches.hunks import hunks
from lib.patches.precision_module import PACKAGE, load_precision
from lib.patches.wheels import unpacked_wheel, wheel
from lib.paths import REPO

RELEASE = "0.9.1"
ENGINE = "verl/workers/engine/fsdp/transformer_impl.py"
SLUGS = ["dtype", "scaler", "wire", "roles", "overlays", "megatron-overflow"]
NAMES = [f"precision/{slug}" for slug in SLUGS]

GENERATE = """\
#!/usr/bin/env bash
# One file of all configs, where upstream's script composes four.
set -eu
python3 scripts/join.py > verl/trainer/config/_generated_ppo_trainer.yaml
git diff --exit-code -- verl/trainer/config/_generated_ppo_trainer.yaml > /dev/null
"""
JOIN = """\
# The configs of the verl that this Python would import.
import importlib.util
from pathlib import Path

configs = Path(importlib.util.find_spec("verl").origin).parent / "trainer/config"
print(*(path.read_text() for path in sorted(configs.rglob("*.yaml")) if "_generated" not in path.name))
"""
HOOKS = """\
repos:
  - repo: local
    hooks:
      - {id: autogen, name: autogen, entry: scripts/generate_trainer_config.sh, language: script, pass_filenames: false}
      - {id: ruff, name: ruff, entry: ruff check --config ruff.toml, language: system, files: precision/.*py$}
      - {id: fmt, name: format, entry: ruff format --check --config ruff.toml, language: system, files: precision/.*py$}
      - {id: rules, name: rules, entry: python3 tests/special_sanity/rules.py, language: system, types: [python]}
"""
RULES = """\
# Copyright 2025 Individual Contributor: the tests. A licence in each file, and no device by name in verl/.
import sys
from pathlib import Path

for path in sys.argv[1:]:
    text = Path(path).read_text()
    assert "Copyright 2025 Individual Contributor:" in text or "Copyright 2024 Bytedance" in text or (
        "Copyright 2025 Bytedance" in text or "Copyright 2026 Bytedance" in text), path
    assert not path.startswith("verl/utils/precision/") or '"cuda"' not in text, path
"""
TITLES = """\
import os
import re

assert re.fullmatch(r"\\[(fsdp|cfg|ckpt|trainer|rollout|megatron|, )+\\] (feat|fix): .+", os.environ["PR_TITLE"])
"""

QUICK = """\
# Copyright 2025 Individual Contributor: the tests.
from pathlib import Path


def test_the_package_compiles():
    for path in Path("verl/utils/precision").glob("*.py"):
        compile(path.read_text(), path, "exec")
"""


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    """A repository of 0.9.1; read it, do not change it."""
    repo = unpacked_wheel(RELEASE, tmp_path_factory.mktemp("released") / "verl")
    for path in (*(repo / "tests").iterdir(), *repo.glob("*.dist-info")):  # upstream's own hooks take minutes
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    ruff = (REPO / "pyproject.toml").read_text().partition("[tool.ruff]\n")[2].partition("[tool.pytest")[0]
    ruff = "\n".join(line for line in ruff.splitlines() if not line.startswith("src = "))
    files = {
        upstream.GENERATE: GENERATE,
        "scripts/join.py": JOIN,
        ".pre-commit-config.yaml": HOOKS,
        "ruff.toml": ruff.replace("tool.ruff.", ""),
        "tests/special_sanity/rules.py": RULES,
        "tests/special_sanity/check_pr_title.py": TITLES,
        "docs/index.rst": "\n   start/install\n\n.. toctree::\n\n   advance/rope\n   advance/fp8.md\n\nEnd\n",
    }
    write_files(repo, files)
    (repo / upstream.GENERATE).chmod(0o755)
    make_repository(repo)
    return repo


@pytest.fixture
def verl(released: Path, tmp_path: Path) -> Path:
    """A clone of it to change."""
    return shutil.copytree(released, tmp_path / "verl", symlinks=True)


def pr_branch(verl: Path, work: Path, project: Path = REPO) -> subprocess.CompletedProcess[str]:
    home = {"PRE_COMMIT_HOME": str(project / ".cache/pre-commit")} if project != REPO else {}
    line = [sys.executable, "-B", project / "scripts/pr_branch.py", verl, "--dir", work]
    return subprocess.run(list(map(str, line)), capture_output=True, text=True, env=os.environ | home)


def copy_of_project(folder: Path) -> Path:
    """Copy the files of the project that the tool needs, to change them and to keep its caches apart."""
    for part in ("scripts", "patches/upstream", "patches/verl", "configs/precision"):
        shutil.copytree(REPO / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".cache/wheels").mkdir(parents=True)
    (folder / ".cache/wheels" / wheel(RELEASE).name).symlink_to(wheel(RELEASE))
    return folder


# --- six branches ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(released: Path, tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Return the tool's output for a main with a later commit, one quick test a branch, and the clone with branches."""
    folder = tmp_path_factory.mktemp("made")
    project = copy_of_project(folder / "project")
    for slug in SLUGS:
        tests = project / "patches/upstream" / slug / "files/tests"
        shutil.rmtree(tests)
        write(tests / f"utils/test_{slug.replace('-', '_')}_on_cpu.py", QUICK.encode())
    repo = shutil.copytree(released, folder / "verl", symlinks=True)
    edit(repo / ENGINE, "import logging\n", "import logging\n\n# A later commit.\n\n")
    edit(repo / "verl/workers/config/engine.py", "class EngineConfig(", "# A later commit.\nclass EngineConfig(")
    commit(repo, "later")
    return pr_branch(repo, folder / "work", project), repo


@pytest.mark.subprocess
def test_six_branches_are_green(made):
    done, repo = made
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "conflict" not in done.stdout and re.search(r"verl 0\.9\.1 -> main \w+: .* same, \d+ merged\n", done.stdout)
    heads = git("for-each-ref", "--format=%(refname:short)", "refs/heads", cwd=repo).split()
    assert sorted(heads) == sorted(["main", *NAMES])
    assert git("status", "--porcelain", cwd=repo) == "" and git("branch", "--show-current", cwd=repo).strip() == "main"
    reports = [block.splitlines() for block in done.stdout.split("\n\n")[1:-1]]
    assert [lines[0].partition(":")[0] for lines in reports] == NAMES
    for lines in reports:
        assert [line.split()[0] for line in lines[2:]] == ["title", "pre-commit", "tests"]
        assert "passes" in lines[2] and re.fullmatch(r"  pre-commit   \d passed(, \d skipped)?", lines[3]), lines
        assert re.fullmatch(r"  tests        \d file.*: \d passed.*", lines[4]), lines
    assert not (repo.parent / "work").exists()


@pytest.mark.subprocess
def test_each_branch_is_one_commit_by_the_user_on_top_of_the_previous_one(made):
    _, repo = made
    for before, name, branch in zip(["main", *NAMES], NAMES, upstream.load_plan().branches, strict=False):
        assert git("rev-parse", f"{name}^", cwd=repo) == git("rev-parse", before, cwd=repo)
        commit_line = git("log", "-1", "--format=%s|%an|%ae", name, cwd=repo).strip()
        assert commit_line == f"{branch.title}|A Developer|developer@example.org"


@pytest.mark.subprocess
def test_package_grows_by_the_functions_that_a_branch_calls(made):
    _, repo = made
    folder = str(Path(PACKAGE).parent)
    sources = [git("grep", "-h", "", name, "--", folder, cwd=repo) for name in NAMES]
    first_branches = {
        "class LossScaler": 1,
        "loss_scaling": 1,
        "def wire_kwargs": 2,
        "def check_role_dtype": 3,
        "account_reported_step": 5,
    }
    for text, first in first_branches.items():
        assert [text in source for source in sources] == [number >= first for number in range(len(NAMES))], text
    for gone in ("of_worker", "patch_stamp", "keep_in_fp32", "check_rewards", "_WORKERS", "0.7.1"):
        assert gone not in sources[5]


@pytest.mark.subprocess
def test_configs_are_generated_and_the_docs_name_their_page(made):
    _, repo = made
    generated = "verl/trainer/config/_generated_ppo_trainer.yaml"
    for name, grad_scaler, role in [(NAMES[0], 0, 0), (NAMES[1], 1, 0), (NAMES[3], 1, 1)]:
        text = git("show", f"{name}:{generated}", cwd=repo)
        assert ("@grad_scaler:" in text, "dtype: ${oc.select:..dtype,bfloat16}" in text) == (grad_scaler, role)
    pages = git("show", f"{NAMES[0]}:docs/index.rst", cwd=repo)
    assert "   advance/fp8.md\n   advance/precision.md\n" in pages and pages.count("precision.md") == 1
    assert git("show", f"{NAMES[5]}:docs/index.rst", cwd=repo) == pages
    page = ""
    for name in NAMES:  # grows by a section
        before, page = page, git("show", f"{name}:docs/advance/precision.md", cwd=repo)
        assert page.startswith(before or "# Precision\n\nLast updated: ") and len(page) > len(before)
        assert not before or page[len(before) :].startswith("\n## ")


@pytest.mark.slow
def test_six_branches_are_green_with_all_their_tests(verl: Path, tmp_path: Path):
    done = pr_branch(verl, tmp_path / "work", copy_of_project(tmp_path / "project"))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


# --- changes in main -------------------------------------------------------------------------------------------


@pytest.mark.subprocess
def test_conflict_names_its_hook_and_is_resolved_by_hand(verl: Path, tmp_path: Path):
    line = "self.scaler = ShardedGradScaler(growth_interval=400)"
    edit(verl / ENGINE, line, line.replace("400", "500"))
    commit(verl, "a hooked line")
    before = contents(verl / ".git")
    work = tmp_path / "work"
    done = pr_branch(verl, work)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    at = lines.index("conflict scaler: fsdp-configure-the-loss-scaler.patch: 3 same, 4 merged, 1 conflict")
    assert re.fullmatch(rf"    conflict {ENGINE}: line \d+ in def _build_fsdp_module.*", lines[at + 2]), lines
    assert lines[-2:] == [
        f"{work}: the tree to finish in: git status; edit; git add; git cherry-pick --continue",
        f"  then continue: make pr-branch VERL={verl} DIR={work}",
    ]
    assert contents(verl / ".git") == before

    plan = upstream.load_plan()
    with pytest.raises(Refused, match=f"has a cherry-pick to finish: git -C {work} cherry-pick --continue; or remove"):
        upstream.check_line(verl, work, plan)
    assert git("diff", "--name-only", "--diff-filter=U", cwd=work).split() == [ENGINE]
    git("add", ENGINE, cwd=work)
    git("-c", "core.editor=true", "cherry-pick", "--continue", cwd=work)
    with pytest.raises(Refused, match=f"conflict marker in {ENGINE} of precision/scaler: git commit --fixup"):
        upstream.check_line(verl, work, plan)
    (at,) = git("log", "--format=%h", "--grep=^scaler: fsdp-configure", "line/to..carried", cwd=work).split()
    theirs = re.sub(r"<{7} .*?={7}\n(.*?)>{7} [^\n]*\n", r"\1", (work / ENGINE).read_text(), flags=re.S)
    (work / ENGINE).write_text(theirs)
    with pytest.raises(Refused, match=f"uncommitted changes: {ENGINE}"):
        upstream.check_line(verl, work, plan)
    git("commit", "--quiet", "--all", f"--fixup={at}", cwd=work)
    git("-c", "sequence.editor=true", "rebase", "--quiet", "--interactive", "--autosquash", "line/to", cwd=work)
    git("commit", "--quiet", "--allow-empty", "--message=a fix without the trailer", cwd=work)
    upstream.check_line(verl, work, plan)
    with pytest.raises(Refused, match="made from other patches than these"):
        upstream.check_line(verl, work, replace(plan, id="another"))
    found = {branch.slug: at for branch, at in upstream.ends(plan, work)}
    assert list(found) == SLUGS and found[SLUGS[-1]] == git("rev-parse", "HEAD", cwd=work).strip()
    commit(verl, "more", "--allow-empty")
    with pytest.raises(Refused, match="another main"):
        upstream.check_line(verl, work, plan)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_every_hunk_is_picked_once_or_its_patch_stays():
    plan = upstream.load_plan()
    patches = {patch.name: patch for patch in plan.stack.patches}
    there = {
        (name, path, number)
        for name, patch in patches.items()
        for path, _, _ in patch.blobs
        for number, _ in enumerate(hunks(patch, path), start=1)
    }
    picks = [pick for branch in plan.branches for pick in branch.picks]
    assert not {(pick.patch, path) for pick in picks for path in pick.hunks} - {each[:2] for each in there}
    taken = Counter(each for each in there for pick in picks if pick.patch == each[0] and pick.takes(*each[1:]))
    assert set(taken.values()) == {1}
    stay = {f"{name}.patch" for name in plan.stay}
    assert stay <= patches.keys() and not stay & {pick.patch for pick in picks}
    left = {each for each in there - taken.keys() if each[0] not in stay}
    # An adapt.patch replaces it.
    assert left == {("megatron-skip-an-overflow.patch", "verl/workers/config/engine.py", 1)}


@pytest.fixture(scope="module")
def line(tmp_path_factory) -> Path:
    """The first line of commits; read it, do not change it."""
    return upstream.pick_line(upstream.load_plan(), tmp_path_factory.mktemp("line"))[0]


@pytest.mark.subprocess
def test_the_last_branch_has_the_stacks_own_code(line: Path):
    plan = upstream.load_plan()
    staying = [patch for patch in plan.stack.patches if patch.name.removesuffix(".patch") in plan.stay]
    after, stay = plan.stack.after, {path for patch in staying for path, _, _ in patch.blobs}
    made = {path: git("rev-parse", f"HEAD:{path}", cwd=line).strip() for path in after}
    differing = {path for path in after.keys() - stay if made[path] != after[path]}
    assert differing == {"verl/model_merger/fsdp_model_merger.py"}  # a comment, by adapt.patch
    assert len(after.keys() - stay) > 20


@pytest.mark.subprocess
def test_hunk_that_depends_on_another_is_refused(line: Path, tmp_path: Path):
    plan = upstream.load_plan()
    pick = upstream.read_pick("megatron-skip-an-overflow")
    (patch,) = (patch for patch in plan.stack.patches if patch.name == pick.patch)
    git("worktree", "add", "--detach", str(tmp_path / "tree"), "HEAD~2", cwd=line)
    fault = (
        r"megatron-overflow cannot take verl/workers/config/engine.py#1 \(line 24.* of megatron-skip-an-overflow.patch"
    )
    with pytest.raises(Refused, match=fault):
        upstream.pick_hunks(plan.branches[-1], pick, patch, tmp_path / "tree")


def test_plan_changes_with_its_patches_and_contains_no_bytecode(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(upstream, "REPO", copy_of_project(tmp_path))
    before = upstream.load_plan()
    cache = before.branches[0].folder / "files/tests/utils/__pycache__"
    write(cache / "test_precision_on_cpu.cpython-311.pyc", b"")
    assert before.branches[0].own_files == upstream.load_plan().branches[0].own_files
    assert not any("__pycache__" in path for path in before.branches[0].own_files)
    assert upstream.load_plan().id == before.id
    edit(tmp_path / "patches/upstream/wire/adapt.patch", "Older checkpoints", "Earlier checkpoints")
    assert upstream.load_plan().id != before.id


def test_texts_that_are_replaced_are_in_the_files():
    plan = upstream.load_plan()
    texts = [plan.stack.added[path].decode() for branch in plan.branches for path in branch.files]
    for old, _ in plan.replace:
        assert any(old in text for text in texts), old


def load_package(folder: Path) -> tuple[set[str], set[str]]:
    """Import only the package in ``folder``; return its ``__all__`` and the definitions of its modules."""
    package = load_precision(folder, "package_of_a_branch")
    assert all(hasattr(package, name) for name in package.__all__)
    defined = set()
    for module in [each for name, each in sys.modules.items() if name.startswith("package_of_a_branch.")]:
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_"):
                defined.add(name)
    return set(package.__all__), defined


@pytest.mark.subprocess
def test_each_branchs_package_exports_its_part_of_the_stacks(tmp_path: Path):
    plan, files = upstream.load_plan(), {}
    for path, content in plan.stack.added.items():
        write(tmp_path / "stack" / path, content)
    exported, defined = load_package(tmp_path / "stack")
    before: set[str] = set()
    for branch in plan.branches:
        files |= upstream.stack_files(plan, branch) | branch.own_files
        for path, content in files.items():
            write(tmp_path / branch.slug / path, content)
        exported_here, defined_here = load_package(tmp_path / branch.slug)
        assert before <= exported_here <= exported and exported_here == exported & defined_here, branch.slug
        assert defined_here <= defined
        before = exported_here


def test_a_leave_out_patch_that_does_not_fit_is_refused(tmp_path: Path):
    plan = upstream.load_plan()
    branch = replace(plan.branches[0], folder=REPO / "patches/upstream/scaler/files")
    assert upstream.stack_files(plan, branch)  # without a patch of its own
    stale = {path: content.replace(b"of_worker", b"of_a_worker") for path, content in plan.stack.added.items()}
    with pytest.raises(Refused, match=r"^patches/upstream/leave-out.patch does not fit the stack's files: git apply"):
        upstream.stack_files(replace(plan, stack=replace(plan.stack, added=stale)), plan.branches[0])
