"""Branches for upstream, on a repository created from the wheel of 0.9.1 with its own hooks and scripts."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.trees import contents, edit, git

import pr_branch as pr_branch_module
from lib.errors import Refused
from lib.files import write
from lib.patches import upstream
from lib.patches.hunks import hunks
from lib.patches.precision_module import MODULE, PACKAGE
from lib.patches.wheels import unpacked_wheel, wheel
from lib.paths import REPO

RELEASE = "0.9.1"
ENGINE = "verl/workers/engine/fsdp/transformer_impl.py"
SLUGS = ["dtype", "scaler", "wire", "roles", "overlays", "megatron-overflow"]
NAMES = [f"precision/{slug}" for slug in SLUGS]

GENERATE = """\
#!/usr/bin/env bash
# One config, as upstream's script writes four.
set -eu
python3 scripts/print_cfg.py --cfg job > verl/trainer/config/_generated_ppo_trainer.yaml
git diff --exit-code -- verl/trainer/config/_generated_ppo_trainer.yaml > /dev/null
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


@pytest.fixture(scope="session")
def released(tmp_path_factory) -> Path:
    """A repository of 0.9.1; read it, do not change it."""
    repo = unpacked_wheel(RELEASE, tmp_path_factory.mktemp("released") / "verl")
    for path in (*(repo / "tests").iterdir(), *repo.glob("*.dist-info")):  # upstream's own hooks take minutes
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path, text in {
        upstream.GENERATE: GENERATE,
        ".pre-commit-config.yaml": HOOKS,
        "ruff.toml": (REPO / "pyproject.toml")
        .read_text()
        .partition("[tool.ruff]\n")[2]
        .partition("[tool.pytest")[0]
        .replace("tool.ruff.", "")
        .replace('src = [".", "scripts", "patches/verl/files"]\n', ""),
        "tests/special_sanity/rules.py": RULES,
        "tests/special_sanity/check_pr_title.py": TITLES,
        "docs/index.rst": "\n   start/install\n\n.. toctree::\n\n   advance/rope\n   advance/fp8.md\n\nEnd\n",
    }.items():
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        (repo / path).write_text(text)
    (repo / upstream.GENERATE).chmod(0o755)
    subprocess.run(["git", "init", "--quiet", "--initial-branch=main"], cwd=repo, check=True)
    git("config", "user.name", "A Developer", cwd=repo)
    git("config", "user.email", "developer@example.org", cwd=repo)
    git("add", "--all", "--force", cwd=repo)
    git("commit", "--quiet", "--message=0.9.1", cwd=repo)
    return repo


@pytest.fixture
def verl(released: Path, tmp_path: Path) -> Path:
    """A clone of it to change."""
    return shutil.copytree(released, tmp_path / "verl", symlinks=True)


def pr_branch(project: Path, *args: object) -> subprocess.CompletedProcess[str]:
    home = {"PRE_COMMIT_HOME": str(project / ".cache/pre-commit")} if project != REPO else {}
    line = [sys.executable, "-B", project / "scripts/pr_branch.py", *args]
    return subprocess.run(list(map(str, line)), capture_output=True, text=True, env=os.environ | home)


def copy_of_project(folder: Path) -> Path:
    """Copy the files of the project that the tool needs, to change them and to keep its caches apart."""
    for part in ("scripts", "patches/upstream", "patches/verl", "configs/precision"):
        shutil.copytree(REPO / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".cache/wheels").mkdir(parents=True)
    (folder / ".cache/wheels" / wheel(RELEASE).name).symlink_to(wheel(RELEASE))
    return folder


def commit(repo: Path, message: str) -> None:
    git("commit", "--quiet", "--all", f"--message={message}", cwd=repo)


# --- six branches ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
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
    return pr_branch(project, repo, "--dir", folder / "work"), repo


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


def test_each_branch_is_one_commit_by_the_user_on_top_of_the_previous_one(made):
    _, repo = made
    for before, name, branch in zip(["main", *NAMES], NAMES, upstream.load_plan().branches, strict=False):
        assert git("rev-parse", f"{name}^", cwd=repo) == git("rev-parse", before, cwd=repo)
        commit_line = git("log", "-1", "--format=%s|%an|%ae", name, cwd=repo).strip()
        assert commit_line == f"{branch.title}|A Developer|developer@example.org"


def test_package_grows_by_the_functions_that_a_branch_calls(made):
    _, repo = made
    folder = str(Path(PACKAGE).parent)
    sources = ["\n".join(git("grep", "-h", "", name, "--", folder, cwd=repo).splitlines()) for name in NAMES]
    assert "LossScaler" not in sources[0] and "class LossScaler" in sources[1]
    assert "loss_scaling" not in sources[0] and "loss_scaling" in sources[1]
    assert "wire_kwargs" not in sources[1] and "def wire_kwargs" in sources[2]
    assert "check_role_dtype" not in sources[2] and "def check_role_dtype" in sources[3]
    assert "account_reported_step" not in sources[4] and "def account_reported_step" in sources[5]
    for gone in ("of_worker", "patch_stamp", "keep_in_fp32", "check_rewards", "_WORKERS", "0.7.1"):
        assert gone not in sources[5]


def test_configs_are_generated_and_the_docs_name_their_page(made):
    _, repo = made
    generated = "verl/trainer/config/_generated_ppo_trainer.yaml"
    for name, grad_scaler, role in [(NAMES[0], 0, 0), (NAMES[1], 1, 0), (NAMES[3], 1, 1)]:
        text = git("show", f"{name}:{generated}", cwd=repo)
        assert ("grad_scaler:" in text, "dtype: ${oc.select:..dtype,bfloat16}" in text) == (grad_scaler, role)
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
    done = pr_branch(copy_of_project(tmp_path / "project"), verl, "--dir", tmp_path / "work")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


# --- checks -------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with a package `verl` of two modules, one of which the branch changes."""
    repo = tmp_path / "small"
    for path, text in {
        "verl/__init__.py": "",
        "verl/config/__init__.py": "from .engine import A\n",
        "verl/config/engine.py": "A = 1\n",
        "verl/other.py": "",
        "verl/outer/__init__.py": "from .inner import A\n",
        "verl/outer/inner/__init__.py": "from .module import A\n",
        "verl/outer/inner/module.py": "A = 1\n",
        "verl/trainer/config/a.yaml": "a: 1\n",
        "tests/test_package_on_cpu.py": "from verl.config import A\n\n\ndef test_it():\n    assert A < 3\n",
        "tests/config/test_module_on_cpu.py": "from verl.config.engine import A\n\ndef test_it():\n    assert A < 2\n",
        "tests/config/test_other_on_cpu.py": "import verl.other\n",
        "tests/config/test_nested_on_cpu.py": "from verl.outer import A\n",
        "tests/config/test_yaml_on_cpu.py": "FOLDER = 'verl/trainer/config'\n",
        "tests/config/test_gpu.py": "import verl.config.engine\n",
        "tests/config/test_broken_on_cpu.py": "import verl.config.engine\n\n\ndef test_it():\n    assert False\n",
    }.items():
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        (repo / path).write_text(text)
    subprocess.run(["git", "init", "--quiet", "--initial-branch=main"], cwd=repo, check=True)
    git("add", "--all", cwd=repo)
    git("commit", "--quiet", "--message=main", cwd=repo)
    git("update-ref", upstream.ONTO, "HEAD", cwd=repo)
    return repo


def test_tests_that_import_changed_modules_are_run(small: Path):
    found = pr_branch_module.touched_tests(small, ["verl/config/engine.py", "tests/config/test_other_on_cpu.py"])
    assert [Path(path).stem for path in found] == [
        f"test_{name}_on_cpu" for name in ("broken", "module", "other", "package")
    ]
    found = pr_branch_module.touched_tests(small, ["verl/trainer/config/a.yaml"])
    assert found == ["tests/config/test_yaml_on_cpu.py"]
    found = pr_branch_module.touched_tests(small, ["verl/outer/inner/module.py"])
    assert found == ["tests/config/test_nested_on_cpu.py"]


def test_failures_that_main_has_too_do_not_fail_a_branch(small: Path):
    edit(small / "verl/config/engine.py", "A = 1", "A = 1  # still")
    commit(small, "a branch")
    found = pr_branch_module.tests(small, ["verl/config/engine.py"])
    assert found.passed and re.fullmatch(r"3 files: 1 failed, 2 passed in .*; those fail on main too", found.result)

    edit(small / "verl/config/engine.py", "A = 1", "A = 2")
    commit(small, "one that breaks a test")
    found = pr_branch_module.tests(small, ["verl/config/engine.py"])
    assert (
        not found.passed and "2 failed, 1 passed" in found.result and found.result.endswith("; 1 of them on main too")
    )
    assert "assert 2 < 2" in found.output
    assert (small / "verl/config/engine.py").read_text() == "A = 2  # still\n"
    assert not pr_branch_module.tests(small, ["docs/page.md"]).passed  # nothing was tested
    assert not pr_branch_module.tests(small, ["verl/other.py"]).passed  # a file without a test

    edit(small / "tests/config/test_broken_on_cpu.py", "assert False", "assert 1 == 2")
    commit(small, "one that changes a test, which still fails")
    assert not pr_branch_module.tests(small, ["tests/config/test_broken_on_cpu.py"]).passed


def test_a_failed_check_fails_the_command(small: Path, tmp_path: Path, monkeypatch, capsys):
    git("commit", "--quiet", "--allow-empty", "--message=a branch", cwd=small)
    branch = upstream.Branch("a", "a title", (), (), small)
    plan = replace(upstream.load_plan(), branches=(branch,))
    monkeypatch.setattr(upstream, "load_plan", lambda: plan)
    monkeypatch.setattr(upstream, "check_clone", lambda *_: None)
    monkeypatch.setattr(upstream, "start", lambda verl, folder, _: (shutil.copytree(verl, folder) and [], True))
    monkeypatch.setattr(upstream, "commit_branches", lambda *_: [branch])
    monkeypatch.setattr(upstream, "deliver", lambda *_: None)
    for passed, code in ((True, 0), (False, 1)):
        check = pr_branch_module.Check("title", passed, "a result", "its output")
        monkeypatch.setattr(pr_branch_module, "checks", lambda *_, check=check: [check])
        assert pr_branch_module.main([str(small), "--dir", str(tmp_path / "work")]) == code
        assert ("--- precision/a: title: a result\nits output" in capsys.readouterr().out) == (not passed)


def test_failed_hooks_and_titles_are_reported(small: Path):
    (small / ".pre-commit-config.yaml").write_text(
        "repos: [{repo: local, hooks: [{id: a, name: never, entry: 'false', language: system},"
        " {id: b, name: always, entry: 'true', language: system}]}]\n"
    )
    git("add", "--all", cwd=small)
    found = pr_branch_module.pre_commit(small, ["verl/other.py"])
    assert not found.passed and found.result == "1 passed, 1 failed: never" and "exit code: 1" in found.output
    (small / "tests/special_sanity").mkdir()
    (small / "tests/special_sanity/check_pr_title.py").write_text(TITLES)
    branch = upstream.Branch("a", "no type", (), (), small)
    assert not pr_branch_module.title(branch, small).passed
    (small / "tests/special_sanity/check_pr_title.py").write_text("raise SystemExit(3)")  # no output
    assert not pr_branch_module.title(replace(branch, title="[cfg] fix: a thing"), small).passed


def test_generator_that_fails_silently_is_reported_in_one_line(small: Path):
    write(small / upstream.GENERATE, b"exit 3")
    write(small / upstream.CONFIGS / "_generated_a.yaml", b"a: 1")
    with pytest.raises(Refused, match="generate_trainer_config.sh of main failed with exit code 3: no output"):
        upstream.generate(small, os.environ)


# --- changes in main -------------------------------------------------------------------------------------------


def test_conflict_names_its_hook_and_is_resolved_by_hand(verl: Path, tmp_path: Path):
    line = "self.scaler = ShardedGradScaler(growth_interval=400)"
    edit(verl / ENGINE, line, line.replace("400", "500"))
    commit(verl, "a hooked line")
    before = contents(verl / ".git")
    work = tmp_path / "work"
    done = pr_branch(REPO, verl, "--dir", work)
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
    again = pr_branch(REPO, verl, "--dir", work)
    assert again.returncode == 1 and again.stderr == (
        f"pr_branch: DIR={work} has a cherry-pick to finish: git -C {work} cherry-pick --continue; or remove it\n"
    )
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
    shutil.copytree(verl, tmp_path / "moved")
    git("commit", "--quiet", "--allow-empty", "--message=more", cwd=tmp_path / "moved")
    with pytest.raises(Refused, match="another main"):
        upstream.check_line(tmp_path / "moved", work, plan)


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


@pytest.fixture(scope="session")
def line(tmp_path_factory) -> Path:
    """The first line of commits; read it, do not change it."""
    return upstream.pick_line(upstream.load_plan(), tmp_path_factory.mktemp("line"))[0]


def test_the_last_branch_has_the_stacks_own_code(line: Path):
    plan = upstream.load_plan()
    staying = [patch for patch in plan.stack.patches if patch.name.removesuffix(".patch") in plan.stay]
    after, stay = plan.stack.after, {path for patch in staying for path, _, _ in patch.blobs}
    made = {path: git("rev-parse", f"HEAD:{path}", cwd=line).strip() for path in after}
    differing = {path for path in after.keys() - stay if made[path] != after[path]}
    assert differing == {"verl/model_merger/fsdp_model_merger.py"}  # a comment, by adapt.patch
    assert len(after.keys() - stay) > 20


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


def imports(folder: Path) -> list[list[str]]:
    """Import only the package in ``folder``; return its ``__all__`` and the definitions of its modules."""
    code = (
        "import json, sys; from pathlib import Path; from lib.patches.precision_module import load_precision\n"
        "package = load_precision(Path(sys.argv[1]), 'alone')\n"
        "assert all(hasattr(package, name) for name in package.__all__)\n"
        "defined = [n for m in list(sys.modules) if m.startswith('alone.') for n, v in vars(sys.modules[m]).items()\n"
        "           if getattr(v, '__module__', '') == m and not n.startswith('_')]\n"
        "print(json.dumps([package.__all__, defined]))"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], cwd=REPO / "scripts", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    """Folders with the precision package of each branch and, as ``stack``, of the stack."""
    plan, folder = upstream.load_plan(), tmp_path_factory.mktemp("packages")
    files: dict[str, bytes] = {}
    for branch in plan.branches:
        files |= upstream.stack_files(plan, branch) | branch.own_files
        for path, content in files.items():
            write(folder / branch.slug / path, content)
    for path, content in plan.stack.added.items():
        write(folder / "stack" / path, content)
    return {path.name: path for path in folder.iterdir()}


def test_each_branchs_package_exports_its_part_of_the_stacks(packages):
    exported, defined = imports(packages["stack"])
    before: set[str] = set()
    for slug in SLUGS:
        exported_here, defined_here = map(set, imports(packages[slug]))
        assert before <= exported_here <= set(exported) and exported_here == set(exported) & defined_here, slug
        assert defined_here <= set(defined)
        before = exported_here


def test_a_leave_out_patch_that_does_not_fit_is_refused(tmp_path: Path):
    plan = upstream.load_plan()
    branch = replace(plan.branches[0], folder=REPO / "patches/upstream/scaler/files")
    assert upstream.stack_files(plan, branch)  # without a patch of its own
    stale = {path: content.replace(b"of_worker", b"of_a_worker") for path, content in plan.stack.added.items()}
    with pytest.raises(Refused, match=r"^patches/upstream/leave-out.patch does not fit the stack's files: git apply"):
        upstream.stack_files(replace(plan, stack=replace(plan.stack, added=stale)), plan.branches[0])


# --- bad input -------------------------------------------------------------------------------------------------------


def refused(verl: Path, tmp_path: Path) -> str:
    """Run the tool, which must refuse in one line and change nothing; return that line."""
    before = contents(tmp_path)
    done = pr_branch(REPO, verl, "--dir", tmp_path / "work")
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.count("\n") == 1, done
    assert contents(tmp_path) == before
    return done.stderr.removeprefix("pr_branch: ")


def test_folders_that_are_not_verl_clones_are_refused(small: Path, tmp_path: Path):
    assert (
        refused(tmp_path / "nowhere", tmp_path)
        == f"VERL={tmp_path / 'nowhere'} is not a folder; give a git clone of verl\n"
    )
    (tmp_path / "plain").mkdir()
    assert "is not the folder of a git clone" in refused(tmp_path / "plain", tmp_path)
    assert "is not the folder of a git clone" in refused(small / "verl", tmp_path)
    assert "is not a clone of verl: its main has no scripts/generate_trainer_config.sh" in refused(small, tmp_path)
    git("branch", "--move", "main", "master", cwd=small)
    assert "has no branch main" in refused(small, tmp_path)


def test_a_clone_that_is_dirty_or_has_the_branches_is_refused(verl: Path, tmp_path: Path):
    (verl / "new.py").write_text("")
    assert "has uncommitted changes: new.py;" in refused(verl, tmp_path)
    (verl / "new.py").unlink()
    for name in (NAMES[4], NAMES[1]):
        git("branch", name, cwd=verl)
    assert f"has these branches already; delete them: git branch -D {NAMES[1]} {NAMES[4]}\n" in refused(verl, tmp_path)
    git("branch", "--delete", "--force", NAMES[1], NAMES[4], cwd=verl)
    git("branch", "precision", cwd=verl)
    assert "has these branches already; delete them: git branch -D precision\n" in refused(verl, tmp_path)
    git("branch", "--delete", "--force", "precision", cwd=verl)
    git("config", "--unset", "user.email", cwd=verl)
    if subprocess.run(["git", "config", "user.email"], cwd=verl, capture_output=True).returncode:
        assert "git has no author for the commits" in refused(verl, tmp_path)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/mine.txt").write_text("")
    assert "exists and was not made by make pr-branch" in refused(verl, tmp_path)
    shutil.rmtree(tmp_path / "work")
    for path in (MODULE, PACKAGE):  # of a stack before the package, and of this one
        write(verl / path, b"")
        git("add", path, cwd=verl)
        commit(verl, "patched")
        assert f"has {path} in its main already" in refused(verl, tmp_path)


def test_a_shallow_clone_is_refused(released: Path, tmp_path: Path):
    git("clone", "--quiet", "--depth=1", f"file://{released}", str(tmp_path / "shallow"), cwd=tmp_path)
    git("-C", "shallow", "commit", "--quiet", "--allow-empty", "--message=more", cwd=tmp_path)
    assert "is a shallow clone, whose branches cannot be pushed: git fetch --unshallow" in refused(
        tmp_path / "shallow", tmp_path
    )
