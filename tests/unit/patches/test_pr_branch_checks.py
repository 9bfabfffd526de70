"""The checks of branches for upstream, and clones that cannot have them, on a repository of a few files."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.trees import commit, contents, edit, git, make_repository, write_files

import pr_branch
from lib.errors import Refused
from lib.files import write
from lib.patches import upstream
from lib.patches.precision_module import MODULE, PACKAGE

NAMES = [branch.name for branch in upstream.load_plan().branches]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with a package `verl` of two modules, one of which the branch changes."""
    repo = tmp_path / "small"
    files = {
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
    }
    write_files(repo, files)
    make_repository(repo)
    git("update-ref", upstream.ONTO, "HEAD", cwd=repo)
    return repo


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (["verl/config/engine.py", "tests/config/test_other_on_cpu.py"], ["broken", "module", "other", "package"]),
        (["verl/trainer/config/a.yaml"], ["yaml"]),
        (["verl/outer/inner/module.py"], ["nested"]),
    ],
)
def test_tests_that_import_changed_modules_are_run(small: Path, changed: list[str], tests: list[str]):
    found = pr_branch.touched_tests(small, changed)
    assert [Path(path).stem for path in found] == [f"test_{name}_on_cpu" for name in tests]


@pytest.mark.subprocess
def test_failures_that_main_has_too_do_not_fail_a_branch(small: Path):
    edit(small / "verl/config/engine.py", "A = 1", "A = 1  # still")
    commit(small, "a branch")
    found = pr_branch.tests(small, ["verl/config/engine.py"])
    assert found.passed and re.fullmatch(r"3 files: 1 failed, 2 passed in .*; those fail on main too", found.result)

    edit(small / "verl/config/engine.py", "A = 1", "A = 2")
    commit(small, "one that breaks a test")
    found = pr_branch.tests(small, ["verl/config/engine.py"])
    assert (
        not found.passed and "2 failed, 1 passed" in found.result and found.result.endswith("; 1 of them on main too")
    )
    assert "assert 2 < 2" in found.output
    assert (small / "verl/config/engine.py").read_text() == "A = 2  # still\n"
    assert not pr_branch.tests(small, ["docs/page.md"]).passed  # nothing was tested
    assert not pr_branch.tests(small, ["verl/other.py"]).passed  # a file without a test

    edit(small / "tests/config/test_broken_on_cpu.py", "assert False", "assert 1 == 2")
    commit(small, "one that changes a test, which still fails")
    assert not pr_branch.tests(small, ["tests/config/test_broken_on_cpu.py"]).passed


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
        check = pr_branch.Check("title", passed, "a result", "its output")
        monkeypatch.setattr(pr_branch, "checks", lambda *_, check=check: [check])
        assert pr_branch.main([str(small), "--dir", str(tmp_path / "work")]) == code
        assert ("--- precision/a: title: a result\nits output" in capsys.readouterr().out) == (not passed)


def test_failed_hooks_and_titles_are_reported(small: Path):
    (small / ".pre-commit-config.yaml").write_text(
        "repos: [{repo: local, hooks: [{id: a, name: never, entry: 'false', language: system},"
        " {id: b, name: always, entry: 'true', language: system}]}]\n"
    )
    git("add", "--all", cwd=small)
    found = pr_branch.pre_commit(small, ["verl/other.py"])
    assert not found.passed and found.result == "1 passed, 1 failed: never" and "exit code: 1" in found.output
    branch = upstream.Branch("a", "a title", (), (), small)
    for code in ("raise SystemExit(3)", "import os; assert os.environ['PR_TITLE'].startswith('[')"):
        write_files(small, {pr_branch.TITLE: code})
        assert not pr_branch.title(branch, small).passed
    assert pr_branch.title(replace(branch, title="[cfg] fix: a thing"), small).passed


def test_generator_that_fails_silently_is_reported_in_one_line(small: Path):
    write(small / upstream.GENERATE, b"exit 3")
    write(small / upstream.CONFIGS / "_generated_a.yaml", b"a: 1")
    with pytest.raises(Refused, match="generate_trainer_config.sh of main failed with exit code 3: no output"):
        upstream.generate(small, os.environ)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def refusal(tmp_path: Path, capsys) -> Callable[[Path], str]:
    """``refusal(verl)``: the line with which the tool refuses a clone; it must change nothing."""

    def of(verl: Path) -> str:
        before = contents(tmp_path)
        assert pr_branch.main([str(verl), "--dir", str(tmp_path / "work")]) == 1
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        assert contents(tmp_path) == before
        return printed.err.removeprefix("pr_branch: ")

    return of


def test_folders_that_are_not_verl_clones_are_refused(small: Path, tmp_path: Path, refusal: Callable[[Path], str]):
    nowhere = tmp_path / "nowhere"
    assert refusal(nowhere) == f"VERL={nowhere} is not a folder; give a git clone of verl\n"
    (tmp_path / "plain").mkdir()
    assert "is not the folder of a git clone" in refusal(tmp_path / "plain")
    assert "is not the folder of a git clone" in refusal(small / "verl")
    assert "is not a clone of verl: its main has no scripts/generate_trainer_config.sh" in refusal(small)
    git("branch", "--move", "main", "master", cwd=small)
    assert "has no branch main" in refusal(small)
    commit(small, "more", "--allow-empty")
    git("clone", "--quiet", "--depth=1", f"file://{small}", str(tmp_path / "shallow"), cwd=tmp_path)
    assert "is a shallow clone, whose branches cannot be pushed: git fetch --unshallow" in refusal(tmp_path / "shallow")


def test_a_clone_that_is_dirty_or_has_the_branches_is_refused(
    small: Path, tmp_path: Path, refusal: Callable[[Path], str]
):
    verl = small
    write_files(verl, dict.fromkeys(upstream.NEEDED, ""))
    git("add", "--all", cwd=verl)
    commit(verl, "what the tool uses of verl's")
    (verl / "new.py").write_text("")
    assert "has uncommitted changes: new.py;" in refusal(verl)
    (verl / "new.py").unlink()
    for names in ((NAMES[1], NAMES[4]), ("precision",)):
        for name in names:
            git("branch", name, cwd=verl)
        assert f"has these branches already; delete them: git branch -D {' '.join(names)}\n" in refusal(verl)
        git("branch", "--delete", "--force", *names, cwd=verl)
    git("config", "--unset", "user.email", cwd=verl)
    if subprocess.run(["git", "config", "user.email"], cwd=verl, capture_output=True).returncode:
        assert "git has no author for the commits" in refusal(verl)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/mine.txt").write_text("")
    assert "exists and was not made by make pr-branch" in refusal(verl)
    shutil.rmtree(tmp_path / "work")
    for path in (MODULE, PACKAGE):  # of a stack before the package, and of this one
        write(verl / path, b"")
        git("add", path, cwd=verl)
        commit(verl, "patched")
        assert f"has {path} in its main already" in refusal(verl)
