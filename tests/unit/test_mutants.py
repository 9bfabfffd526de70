"""The command ``mutants``: the tables fit the files, tests are selected by imports, and survivors are reported."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mutants import __main__ as command
from mutants import trial
from mutants import workspace as workspace_module
from mutants.document import survived
from mutants.selection import select_tests
from mutants.table import Mutant, choose, load
from mutants.trial import Outcome, try_mutants
from mutants.workspace import OF_THE_TABLES, Workspace
from support.trees import make_repository, write_files

from verl_precision.errors import Refused
from verl_precision.files import write_json
from verl_precision.paths import REPO

TABLE = load()
HARMLESS = Mutant(
    area="verl",
    name="harmless",
    defect="none",
    seen_in="nowhere",
    file="tests/mutants/table.py",
    replace='only.replace(",", " ")',
    by='only.replace(",", "  ")',
    tests=("tests/unit/test_mutants.py::test_areas_and_names_are_chosen",),
)
DEADLY = replace(HARMLESS, name="deadly", by='only.replace(";", " ")')
OF_VERL = replace(
    HARMLESS,
    name="of-verl",
    file="verl/utils/precision/accounting.py",
    replace="if taken == skipped == 0:",
    by="if taken != skipped == 0:",
    tests=("tests/engine/test_accounting.py::test_a_reported_step_without_loss_scaling_is_accounted",),
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("workspace"))


@pytest.mark.parametrize("area", dict.fromkeys(mutant.area for mutant in TABLE))
def test_every_mutant_changes_the_program(area, workspace):
    for mutant in choose(TABLE, area):
        file = workspace.file(mutant)
        source = mutant.source(file)
        assert source != file.read_text(), mutant.name
        if mutant.file.endswith(".py"):
            compile(source, mutant.name, "exec")
        assert mutant.tests or select_tests(mutant.file, REPO)


def test_tests_that_need_two_trees_are_refused(workspace):
    of_the_suite = "tests/conformance/verl/test_conformance.py::test_patched_release_has_the_behaviour[inert_ref-0.9.1]"
    with pytest.raises(Refused, match="of-verl: some of its tests run on trees with the series fixes, others do not"):
        workspace.file(replace(OF_VERL, tests=(*OF_VERL.tests, of_the_suite)))


def test_every_test_of_the_tables_exists_and_mutants_are_distinct():
    for test in {test for mutant in TABLE for test in mutant.tests}:
        file, _, name = test.partition("::")
        function = name.partition("[")[0].rpartition("::")[2]
        assert re.search(rf"^ *def {function}\(" if name else "", (REPO / file).read_text(), re.M), test
    assert len({(mutant.file, mutant.release, mutant.replace, mutant.by) for mutant in TABLE}) == len(TABLE)


@pytest.mark.slow
@pytest.mark.subprocess
def test_every_parameter_in_the_tables_exists():
    tests = {test for mutant in TABLE for test in mutant.tests if "[" in test}
    line = [sys.executable, "-m", "pytest", "-q", "--collect-only", *tests]
    done = subprocess.run(line, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_areas_and_names_are_chosen():
    other = replace(HARMLESS, area="oat", name="other")
    assert choose([HARMLESS, DEADLY, other], "") == [HARMLESS, DEADLY, other]
    assert choose([HARMLESS, DEADLY, other], "oat,deadly") == [DEADLY, other]
    with pytest.raises(Refused, match="ONLY=nothing: is neither a mutant nor an area; the areas are verl, oat"):
        choose([HARMLESS, DEADLY, other], "oat nothing")


def test_tests_are_selected_by_imports_the_nearest_first(tmp_path):
    tests = select_tests("scripts/verl_precision/patch/apply.py", REPO)
    assert tests[0] == "tests/unit/patch/test_apply.py"
    assert "tests/unit/patch/test_upgrade.py" in tests and "tests/unit/recipes/test_flowrl_targets.py" not in tests
    assert "tests/unit/doctor/test_doctor.py" in select_tests("scripts/verl_precision/commands/doctor.py", REPO)
    with pytest.raises(Refused, match="Makefile: no test's imports lead to it; name its tests"):
        select_tests("Makefile", REPO)
    started = {"recipes/task/prepare.py": "", "tests/unit/test_a.py": 'run(["-m", "recipes.task.prepare"])\n'}
    write_files(tmp_path, started)
    assert select_tests("recipes/task/prepare.py", tmp_path) == ("tests/unit/test_a.py",)


@pytest.mark.slow
@pytest.mark.subprocess
def test_outcomes_are_kept_until_mutant_file_or_tests_change(tmp_path, monkeypatch):
    kept, shown = tmp_path / "outcomes.json", []
    expected = {"harmless": "", "deadly": DEADLY.tests[0], "of-verl": OF_VERL.tests[0]}
    pool = [HARMLESS, DEADLY, OF_VERL]
    outcomes = try_mutants(pool, 1, lambda mutant, outcome: shown.append(mutant.name), kept)
    assert {name: outcome.killer for name, outcome in outcomes.items()} == expected and shown == list(expected)

    monkeypatch.setattr(Workspace, "first_failure", lambda *_: pytest.fail("is tried again"))
    assert try_mutants(pool, 1, lambda *_: None, kept) == outcomes
    with pytest.raises(pytest.fail.Exception, match="is tried again"):
        try_mutants([replace(DEADLY, by="only")], 1, lambda *_: None, kept)

    monkeypatch.setattr(trial, "REPO", tmp_path)
    folder = "tests/unit"
    files = {
        "file.py": "",
        f"{folder}/test_a.py": "from support import trees\n",
        f"{folder}/cases.py": "",
        "tests/folder/test_b.py": "",
        "tests/conftest.py": "",
        "tests/support/trees.py": "from support.waiting import wait\n",
        "tests/support/waiting.py": "",
    }
    write_files(tmp_path, files | {"tests/support/unused.py": ""})
    tests = [f"{folder}/test_a.py::test_it", "tests/folder"]
    keys = [trial.key(HARMLESS, tmp_path / "file.py", tests)]
    for name in ("tests/support/unused.py", *files):
        (tmp_path / name).write_text("A = 1\n")
        keys.append(trial.key(HARMLESS, tmp_path / "file.py", tests))
    assert keys[0] == keys[1] and len(set(keys)) == 1 + len(files)


def test_command_fails_on_a_survivor_that_is_not_equivalent(monkeypatch, tmp_path, capsys):
    table = [HARMLESS, DEADLY, replace(HARMLESS, name="same", equivalent="the order of a comparison")]
    monkeypatch.setattr(command, "load", lambda: table)
    monkeypatch.setattr(command, "DOCUMENT", tmp_path / "mutants.md")
    known = {"harmless": Outcome(), "deadly": Outcome("tests/unit/a.py::test_b[x|y]"), "same": Outcome()}

    def tried(chosen, jobs, show):
        for mutant in chosen:
            show(mutant, known[mutant.name])
        return known

    monkeypatch.setattr(command, "try_mutants", tried)
    assert command.main([]) == 1
    out = capsys.readouterr().out
    assert "1/3 verl/harmless: SURVIVED" in out and "2/3 verl/deadly: killed by tests/unit/a.py::test_b[x|y]" in out
    assert out.endswith("3 mutants, 1 survivors: harmless\n")
    written = (tmp_path / "mutants.md").read_text()
    counts = "| 3 | 1 | 0 | 0 | 1 | 1 |"
    assert f"| [verl](../../tests/mutants/verl.toml) {counts}\n| all {counts}\n" in written
    assert "\nverl/harmless, none: SURVIVED\n" in written and "deadly" not in written
    assert "\nverl/same, none: equivalent: the order of a comparison\n" in written
    (tmp_path / "mutants.md").unlink()
    assert command.main(["deadly same"]) == 0
    assert not (tmp_path / "mutants.md").exists(), "a part of the mutants does not write the document of all"


def test_wrong_tables_are_refused(tmp_path):
    whole = "[one]\ndefect='x'\nseen_in=''\nfile='f'\nreplace='a'\nby='b'\n"
    (tmp_path / "b.toml").write_text(whole)
    for text, refusal in {"[one]\ndefect = 'x'\n": "a.toml: one: .*missing", whole: "b.toml: one is in a"}.items():
        (tmp_path / "a.toml").write_text(text)
        with pytest.raises(Refused, match=refusal):
            load(tmp_path)


GONE = f"{HARMLESS.tests[0]}[gone]"


def trial_of(mutants: dict[str, Mutant], tmp_path: Path, killer: str = GONE) -> dict[str, Outcome]:
    """Try mutants under these names, whose last killer is gone, and return their outcomes by name."""
    named = [replace(mutant, name=name) for name, mutant in mutants.items()]
    last = {"key": "", "killer": killer}
    write_json(tmp_path / "outcomes.json", dict.fromkeys(mutants, last))
    return try_mutants(named, 1, lambda *_: None, tmp_path / "outcomes.json")


@pytest.mark.subprocess
def test_mutant_that_cannot_be_judged_is_a_problem(tmp_path):
    mutants = {
        "its text occurs 0 times in tests/mutants/": replace(HARMLESS, replace="no such text"),
        "pytest ended with 4": replace(HARMLESS, tests=("tests/unit/test_mutants.py::test_of_no_such_name",)),
        "pytest ended with 5": replace(HARMLESS, tests=(OF_THE_TABLES,)),
    }
    for problem, outcome in trial_of(mutants, tmp_path).items():
        assert problem in outcome.problem and survived(HARMLESS, outcome)
    kept = json.loads((tmp_path / "outcomes.json").read_text())
    assert {outcome["key"] for outcome in kept.values()} == {""}, "they are tried again"


def test_killer_that_fails_without_the_mutant_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(Workspace, "first_failure", lambda self, tests, mutant: tests[0])
    outcomes = trial_of({"fails": HARMLESS}, tmp_path)
    assert f"{GONE} fails without the mutant, too" in outcomes["fails"].problem


@pytest.mark.parametrize(("killer", "first"), [(GONE, [[GONE]]), ("tests/engine/test_engine.py::test_other", [])])
def test_last_killer_goes_first_only_if_it_is_one_of_the_mutants_tests(killer, first, tmp_path, monkeypatch):
    """Another one may need another tree."""
    tried = []
    monkeypatch.setattr(Workspace, "first_failure", lambda self, tests, mutant: tried.append(list(tests)) or "")
    assert trial_of({"harmless": HARMLESS}, tmp_path, killer) == {"harmless": Outcome()}
    assert tried == [*first, list(HARMLESS.tests)]


def test_workspace_is_the_checkout_as_it_is(tmp_path, monkeypatch):
    repo = tmp_path / "repo"
    write_files(repo, {"changed.py": "", "deleted.py": "", "same.py": ""})
    make_repository(repo)
    write_files(repo, {"changed.py": "A = 1\n", "new.py": "B = 1\n"})
    (repo / "deleted.py").unlink()
    monkeypatch.setattr(workspace_module, "REPO", repo)
    root = Workspace(tmp_path).root
    found = {path.name: path.read_text() for path in root.glob("*.py")}
    assert found == {"changed.py": "A = 1\n", "new.py": "B = 1\n", "same.py": ""}


@pytest.mark.subprocess
@pytest.mark.parametrize("name", ["", "::test_wrong_tables_are_refused"])
def test_mutant_that_breaks_an_import_is_killed(workspace, name):
    mutant = replace(HARMLESS, name="import", replace="def load(", by="def no_load(")
    with workspace.mutated(mutant):
        assert workspace.first_failure([f"tests/unit/test_mutants.py{name}"], mutant) == "tests/unit/test_mutants.py"
