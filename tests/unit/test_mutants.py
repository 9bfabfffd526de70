"""``scripts/mutants.py``: its table fits the patched tree, and it reports survivors."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import chain

import pytest

import mutants
from lib.errors import Refused
from lib.paths import REPO


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return mutants.patched_tree(tmp_path_factory.mktemp("patched"))


HARMLESS = mutants.Mutant(
    name="harmless",
    defect="none",
    seen_in="nowhere",
    file="verl/utils/precision/accounting.py",
    replace="if taken == skipped == 0:",
    by="if 0 == taken == skipped:",
    tests=("tests/engine/test_accounting.py::test_an_engine_without_accounted_steps_has_no_metrics",),
)
DEADLY = replace(HARMLESS, name="deadly", by="if taken == skipped == 1:")


@pytest.mark.parametrize("mutant", mutants.load(mutants.TABLE), ids=lambda mutant: mutant.name)
def test_every_mutant_changes_the_program(mutant, tree):
    source = mutant.source(tree)
    assert source != (tree / mutant.file).read_text()
    if mutant.file.endswith(".py"):
        compile(source, mutant.file, "exec")


def test_mutants_are_distinct():
    table = mutants.load(mutants.TABLE)
    assert len(table) >= 20
    assert len({(mutant.file, mutant.replace, mutant.by) for mutant in table}) == len(table)


def test_every_test_of_the_table_exists():
    tests = {test for mutant in mutants.load(mutants.TABLE) for test in mutant.tests}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", *tests], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_command_reports_a_survivor_and_fails(monkeypatch, tmp_path, capsys):
    entries = [vars(mutant) | {"tests": list(mutant.tests)} for mutant in (HARMLESS, DEADLY)]
    lines = [
        [f"[{one.pop('name')}]", *(f"{key} = {json.dumps(value)}" for key, value in one.items())] for one in entries
    ]
    (tmp_path / "mutants.toml").write_text("\n".join(chain(*lines)))
    monkeypatch.setattr(mutants, "TABLE", tmp_path / "mutants.toml")
    monkeypatch.setattr(mutants, "DOCUMENT", tmp_path / "mutants.md")
    assert mutants.main([]) == 1
    out = capsys.readouterr().out
    assert "1/2 harmless: SURVIVED" in out and f"2/2 deadly: killed by {DEADLY.tests[0]}" in out
    written = (tmp_path / "mutants.md").read_text()
    assert "2 mutants, 1 survivors" in written and "| harmless | none | nowhere | **survived** |" in written


def test_unknown_mutant_is_refused(capsys):
    assert mutants.main(["none-of-these"]) == 1
    assert "mutants: none-of-these: is not a mutant; the mutants are unknown-dtype-accept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mutant", "refusal"),
    [
        (
            replace(HARMLESS, replace="no such text"),
            "harmless: its text occurs 0 times in verl/utils/precision/accounting.py, not once",
        ),
        (replace(HARMLESS, replace="skipped"), r"harmless: its text occurs \d\d+ times"),
        (replace(HARMLESS, tests=("tests/engine/test_accounting.py::test_of_no_such_name",)), "pytest ended with 4"),
    ],
)
def test_mutant_that_cannot_be_judged_is_refused(mutant, refusal, tree):
    with pytest.raises(Refused, match=refusal):
        mutants.killers([mutant], tree)


def test_failing_tree_is_refused(tree):
    file = tree / DEADLY.file
    original = file.read_text()
    file.write_text(DEADLY.source(tree))
    try:
        with pytest.raises(Refused, match="has_no_metrics fails on the tree without a mutant"):
            mutants.killers(
                [replace(HARMLESS, replace="# an engine whose own", by="# an engine of which the own")], tree
            )
    finally:
        file.write_text(original)
