"""Branches for upstream, on a repository of the wheel of 0.9.1 with its own hooks, and their checks on a small one."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.trees import commit, contents, edit, git, make_repository, write_files

from verl_precision.commands import pr_branch
from verl_precision.errors import Refused
from verl_precision.files import write
from verl_precision.patch import upstream
from verl_precision.patch.commits import BASE
from verl_precision.patch.git import run_git
from verl_precision.patch.hunks import hunks
from verl_precision.patch.precision_module import PACKAGE, load_precision
from verl_precision.patch.wheels import unpacked_wheel, wheel
from verl_precision.paths import REPO

RELEASE = "0.9.1"
ENGINE = "verl/workers/engine/fsdp/transformer_impl.py"
SLUGS = ["dtype", "scaler", "wire", "roles", "overlays", "megatron-overflow"]
NAMES = [f"precision/{slug}" for slug in SLUGS]

GENERATE = """\
#!/usr/bin/env bash
# One file of all configs of the verl that this Python would import, where upstream's script composes four.
set -eu
python3 -P - > verl/trainer/config/_generated_ppo_trainer.yaml <<END
import importlib.util
from pathlib import Path

configs = Path(importlib.util.find_spec("verl").origin).parent / "trainer/config"
print(*(path.read_text() for path in sorted(configs.rglob("*.yaml")) if "_generated" not in path.name))
END
git diff --exit-code -- verl/trainer/config/_generated_ppo_trainer.yaml > /dev/null
"""
HOOKS = """\
repos:
  - repo: local
    hooks:
      - {id: autogen, name: autogen, entry: scripts/generate_trainer_config.sh, language: script, pass_filenames: false}
      - {id: ruff, name: ruff, entry: ruff check --config ruff.toml, language: system, files: precision/.*py$}
      - {id: fmt, name: format, entry: ruff format --check --config ruff.toml, language: system, files: precision/.*py$}
      - {id: licence, name: licence, entry: 'Copyright 202[456] (Individual Contributor:|Bytedance)', args: [--negate],
         language: pygrep, types: [python]}
      - {id: device, name: device, entry: '"cuda"', language: pygrep, files: ^verl/utils/precision/}
"""
TITLES = """\
import os, re
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
        ".pre-commit-config.yaml": HOOKS,
        "ruff.toml": ruff.replace("tool.ruff.", ""),
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


def make_branches(verl: Path, work: Path, project: Path = REPO) -> subprocess.CompletedProcess[str]:
    home = {"PRE_COMMIT_HOME": str(project / ".cache/pre-commit")} if project != REPO else {}
    line = [sys.executable, "-B", project / "scripts/verl_precision", "pr-branch", verl, "--dir", work]
    return subprocess.run(list(map(str, line)), capture_output=True, text=True, env=os.environ | home)


def copy_of_project(folder: Path) -> Path:
    """Copy the files of the project that the tool needs, to change them and to keep its caches apart."""
    for part in ("scripts", "patches/upstream", "patches/verl", "configs/precision"):
        shutil.copytree(REPO / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".cache/wheels").mkdir(parents=True)
    (folder / ".cache/wheels" / wheel(RELEASE).name).symlink_to(wheel(RELEASE))
    return folder


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
    return make_branches(repo, folder / "work", project), repo


@pytest.mark.slow
@pytest.mark.subprocess
def test_six_branches_are_green(made):
    done, repo = made
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    heads = git("for-each-ref", "--format=%(refname:short)", "refs/heads", cwd=repo).split()
    assert sorted(heads) == sorted(["main", *NAMES])
    assert git("status", "--porcelain", cwd=repo) == "" and git("branch", "--show-current", cwd=repo).strip() == "main"
    reports = [block.splitlines() for block in done.stdout.lstrip().split("\n\n")[:-1]]
    assert [lines[0].partition(":")[0] for lines in reports] == NAMES
    for lines in reports:
        assert [line.split()[0] for line in lines[2:]] == ["title", "pre-commit", "tests"]
        assert all(line.split()[1:] == ["passes"] for line in lines[2:]), lines
    assert not (repo.parent / "work").exists()


@pytest.mark.slow
@pytest.mark.subprocess
def test_each_branch_is_a_commit_on_the_previous_one_with_its_configs_and_its_section_of_the_docs(made):
    _, repo = made
    parent, page = "main", ""
    for name, branch in zip(NAMES, upstream.load_plan().branches, strict=True):
        assert git("rev-parse", f"{name}^", cwd=repo) == git("rev-parse", parent, cwd=repo)
        commit_line = git("log", "-1", "--format=%s|%an|%ae", name, cwd=repo).strip()
        assert commit_line == f"{branch.title}|A Developer|developer@example.org"
        pages = git("show", f"{name}:docs/index.rst", cwd=repo)
        assert "   advance/fp8.md\n   advance/precision.md\n" in pages and pages.count("precision.md") == 1
        parent, before, page = name, page, git("show", f"{name}:docs/advance/precision.md", cwd=repo)
        assert page.startswith(before or "# Precision\n\nLast updated: ") and len(page) > len(before)
        assert not before or page[len(before) :].startswith("\n## ")
    for name, grad_scaler, role in [(NAMES[0], False, False), (NAMES[1], True, False), (NAMES[3], True, True)]:
        text = git("show", f"{name}:verl/trainer/config/_generated_ppo_trainer.yaml", cwd=repo)
        key = "dtype: ${oc.select:actor_rollout_ref.actor.dtype,null}"
        assert ("@grad_scaler:" in text, key in text) == (grad_scaler, role)


@pytest.mark.slow
def test_six_branches_are_green_with_all_their_tests(verl: Path, tmp_path: Path):
    done = make_branches(verl, tmp_path / "work", copy_of_project(tmp_path / "project"))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.subprocess
def test_conflict_names_its_hook_and_is_resolved_by_hand(verl: Path, tmp_path: Path):
    line = "self.scaler = ShardedGradScaler(growth_interval=400)"
    edit(verl / ENGINE, line, line.replace("400", "500"))
    commit(verl, "a hooked line")
    before = contents(verl / ".git")
    work = tmp_path / "work"
    done = make_branches(verl, work)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        f"scaler: fsdp-configure-the-loss-scaler.patch conflicts with main in {ENGINE}",
        f"{work}: the tree to finish in: git status; edit; git add; git cherry-pick --continue",
        f"  then continue: make pr-branch VERL={verl} DIR={work}",
    ]
    assert contents(verl / ".git") == before

    def refused(message: str, changed: upstream.BranchPlan | None = None) -> None:
        with pytest.raises(Refused, match=message):
            upstream.check_line(verl, work, changed or plan)

    plan = upstream.load_plan()
    refused(f"has a cherry-pick to finish: git -C {work} cherry-pick --continue; or remove")
    assert git("diff", "--name-only", "--diff-filter=U", cwd=work).split() == [ENGINE]
    git("add", ENGINE, cwd=work)
    git("-c", "core.editor=true", "cherry-pick", "--continue", cwd=work)
    refused(rf"conflict marker in {ENGINE} of the commit 'scaler: fsdp-configure-\S+': git commit --fixup")
    (at,) = git("log", "--format=%h", "--grep=^scaler: fsdp-configure", "line/to..carried", cwd=work).split()
    theirs = re.sub(r"<{7} .*?={7}\n(.*?)>{7} [^\n]*\n", r"\1", (work / ENGINE).read_text(), flags=re.S)
    (work / ENGINE).write_text(theirs)
    refused(f"uncommitted changes: {ENGINE}")
    git("commit", "--quiet", "--all", f"--fixup={at}", cwd=work)
    git("-c", "sequence.editor=true", "rebase", "--quiet", "--interactive", "--autosquash", "line/to", cwd=work)
    git("commit", "--quiet", "--allow-empty", "--message=a fix without the trailer", cwd=work)
    upstream.check_line(verl, work, plan)
    refused("made from another main or from other patches", replace(plan, id="another"))
    found = {branch.slug: at for branch, at in upstream.ends(plan, work)}
    assert list(found) == SLUGS and found[SLUGS[-1]] == git("rev-parse", "HEAD", cwd=work).strip()
    commit(verl, "more", "--allow-empty")
    refused("made from another main")


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
    assert not {each for each in there - taken.keys() if each[0] not in stay}
    texts = [plan.stack.added[path].decode() for branch in plan.branches for path in branch.files]
    assert all(any(old in text for text in texts) for old, _ in plan.replace)


@pytest.mark.subprocess
def test_the_last_branch_has_the_stacks_own_code(tmp_path: Path):
    """It is compared with the stack without the patches that stay, except files of those that later ones build on."""
    plan = upstream.load_plan()
    tree = upstream.pick_line(plan, tmp_path)
    git("checkout", "--quiet", "stack", cwd=tree)
    commits = git("log", "--reverse", "--format=%H", f"{BASE}{RELEASE}..", cwd=tree).split()
    compared = set(plan.stack.after)
    for patch, made in reversed(list(zip(plan.stack.patches, commits, strict=True))):
        if patch.name.removesuffix(".patch") in plan.stay and run_git("revert", "--no-edit", made, cwd=tree).returncode:
            git("revert", "--abort", cwd=tree)
            compared -= {path for path, _, _ in patch.blobs}
    differing = compared & set(git("diff", "--name-only", "line", "stack", cwd=tree).split())
    assert differing == {"verl/model_merger/fsdp_model_merger.py"}  # a comment, by adapt.patch
    assert len(compared) >= 30


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


def load_package(folder: Path) -> tuple[set[str], set[str]]:
    """Import only the package in ``folder``; return its ``__all__`` and the definitions of its modules."""
    package = load_precision(folder, "package_of_a_branch")
    assert all(hasattr(package, name) for name in package.__all__)
    modules = [each for name, each in sys.modules.items() if name.startswith("package_of_a_branch.")]
    public = [(module, name) for module in modules for name in vars(module) if not name.startswith("_")]
    defined = {name for module, name in public if getattr(vars(module)[name], "__module__", "") == module.__name__}
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


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with a package `verl`."""
    repo = tmp_path / "small"
    write_files(repo, {"verl/__init__.py": "", "verl/other.py": ""})
    make_repository(repo)
    return repo


def test_a_failed_check_fails_the_command(small: Path, tmp_path: Path, monkeypatch, capsys):
    git("commit", "--quiet", "--allow-empty", "--message=a branch", cwd=small)
    branch = upstream.Branch("a", "a title", (), (), small)
    plan = replace(upstream.load_plan(), branches=(branch,))
    monkeypatch.setattr(upstream, "load_plan", lambda: plan)
    monkeypatch.setattr(upstream, "check_clone", lambda *_: None)
    monkeypatch.setattr(upstream, "start", lambda verl, folder, _: shutil.copytree(verl, folder) and [])
    monkeypatch.setattr(upstream, "commit_branches", lambda *_: [branch])
    monkeypatch.setattr(upstream, "deliver", lambda *_: None)
    for passed, code in ((True, 0), (False, 1)):
        found = [("title", "" if passed else "its output\n"), ("tests", "")]
        monkeypatch.setattr(pr_branch, "checks", lambda *_, found=found: found)
        assert pr_branch.main([str(small), "--dir", str(tmp_path / "work")]) == code
        assert ("  title        failed\nits output\n" in capsys.readouterr().out) == (not passed)


@pytest.mark.subprocess
def test_failed_hooks_titles_tests_and_generators_are_reported(small: Path):
    hooks = "repos: [{repo: local, hooks: [{id: a, name: hook, entry: %s, language: system}]}]\n"
    test = "tests/config/test_broken_on_cpu.py"
    branch = upstream.Branch("a", "[cfg] fix: a thing", (), (), small)
    write_files(small, {pr_branch.TITLE: "import os; assert os.environ['PR_TITLE'].startswith('[')"})

    def failed(name: str, entry: str, source: str, title: str = branch.title) -> str:
        """Return the output of the only check that fails."""
        write_files(small, {".pre-commit-config.yaml": hooks % entry, test: source})
        git("add", "--all", cwd=small)
        commit(small, "a branch", "--allow-empty")
        faults = {name: fault for name, fault in pr_branch.checks(replace(branch, title=title), small) if fault}
        assert list(faults) == ([name] if name else [])
        return faults.get(name, "")

    passing, failing = "import verl.other\n\n\ndef test_it():\n    pass\n", "def test_it():\n    assert 2 < 2\n"
    failed("", "'true'", passing)
    assert "exit code: 1" in failed("pre-commit", "'false'", f"{passing}# 2\n")
    assert "AssertionError" in failed("title", "'true'", f"{passing}# 3\n", title="a thing")
    assert "assert 2 < 2" in failed("tests", "'true'", failing)
    write(small / upstream.GENERATE, b"exit 3")
    write(small / upstream.CONFIGS / "_generated_a.yaml", b"a: 1")
    with pytest.raises(Refused, match="generate_trainer_config.sh of main failed with exit code 3: no output"):
        upstream.generate(small, os.environ)


@pytest.fixture
def refusal(tmp_path: Path, capsys) -> Callable[[Path], str]:
    """``refusal(verl)``: the line with which the tool refuses a clone; it must change nothing."""

    def of(verl: Path) -> str:
        before = contents(tmp_path)
        with pytest.raises(Refused) as refused:
            pr_branch.main([str(verl), "--dir", str(tmp_path / "work")])
        message = str(refused.value)
        assert capsys.readouterr().out == "" and "\n" not in message and contents(tmp_path) == before
        return message

    return of


def test_folders_that_are_not_verl_clones_are_refused(small: Path, tmp_path: Path, refusal: Callable[[Path], str]):
    nowhere = tmp_path / "nowhere"
    for folder in (nowhere, small / "verl"):
        assert refusal(folder) == f"VERL={folder} is not a git clone; give a clone of verl"
    assert "is not a clone of verl: its main has no scripts/generate_trainer_config.sh" in refusal(small)
    git("branch", "--move", "main", "master", cwd=small)
    assert "has no branch main" in refusal(small)
    commit(small, "more", "--allow-empty")
    git("clone", "--quiet", "--depth=1", f"file://{small}", str(tmp_path / "shallow"), cwd=tmp_path)
    assert "is a shallow clone, whose branches cannot be pushed: git fetch --unshallow" in refusal(tmp_path / "shallow")


def test_clone_that_is_dirty_or_has_the_branches_is_refused(small: Path, refusal: Callable[[Path], str]):
    verl, work = small, small.parent / "work"
    write_files(verl, dict.fromkeys(upstream.NEEDED, ""))
    git("add", "--all", cwd=verl)
    commit(verl, "what the tool uses of verl's")
    (verl / "new.py").write_text("")
    assert "has uncommitted changes: new.py;" in refusal(verl)
    (verl / "new.py").unlink()
    for names in ((NAMES[1], NAMES[4]), ("precision",)):
        for name in names:
            git("branch", name, cwd=verl)
        assert refusal(verl).endswith(f"has these branches already; delete them: git branch -D {' '.join(names)}")
        git("branch", "--delete", "--force", *names, cwd=verl)
    git("config", "user.name", "", cwd=verl)
    assert "git has no author for the commits" in refusal(verl)
    write(work / "mine.txt", b"")
    assert "exists and was not made by make pr-branch" in refusal(verl)
    shutil.rmtree(work)
    write(verl / PACKAGE, b"")
    git("add", PACKAGE, cwd=verl)
    commit(verl, "patched")
    assert f"has {PACKAGE} in its main already" in refusal(verl)
