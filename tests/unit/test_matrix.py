"""The support matrices in README.md match the recorded results, and these match the current stacks."""

import json
import sys

import pytest

import matrix
from lib.patches.releases import OAT, VERL, Framework
from lib.patches.stack import load_stacks

RESULTS = {VERL: matrix.RESULTS, OAT: matrix.OAT_RESULTS}


def case(upstream_has_it: bool = False, **verdict) -> dict:
    return {"row": "a behaviour", "upstream_has_it": upstream_has_it, **verdict}


def release(*cases: dict) -> dict:
    return {
        "stack": "s1",
        "lines": {"added": 2, "removed": 1},
        "seen": {str(number): case for number, case in enumerate(cases)},
    }


@pytest.mark.parametrize(
    ("cases", "cell"),
    [
        ([case(passed=True)], "✓"),
        ([case(passed=True, upstream_has_it=True)], "✓°"),
        ([case(passed=True, upstream_has_it=True), case(passed=True)], "✓(°)"),
        ([case(passed=True), case(passed=False)], "**fails**"),
        ([case(absent="no such thing there")], "–ᵃ"),
        ([case(not_run="no such thing here")], "not runᵃ"),
        ([case(passed=True), case(not_run="no such thing here")], "✓, in part not runᵃ"),
        ([case(absent="no such thing there"), case(not_run="no such thing here")], "not runᵃ"),
    ],
)
def test_cell_marks_the_outcome(cases, cell):
    for lines in (matrix.table({"1.0": release(*cases)}, {}), matrix.oat_table({"1.0": release(*cases)}, {})):
        assert lines.startswith("|  | 1.0 |\n") and f"\n| a behaviour | {cell} |\n" in lines
        notes = lines.splitlines()[-1].removeprefix(matrix.LEGEND).split(" ᵇ ")[0]
        assert ("ᵃ" in cell) == notes.startswith(" ᵃ No such thing ")


def test_note_of_several_cells_is_written_once():
    results = {"1.0": release(case(absent="no such thing")), "1.1": release(case(absent="no such thing"))}
    *_, notes = (lines := matrix.oat_table(results, {}).splitlines())
    assert "| a behaviour | –ᵃ | –ᵃ |" in lines and notes == f"{matrix.LEGEND} ᵃ No such thing."


def test_run_counts_only_for_its_stack():
    def last(stack: str) -> list[str]:
        runs = {"1.0": {"stack": stack, "rollout": "vLLM", "flowrl": {"stack": stack}}}
        return matrix.table({"1.0": release()}, runs).splitlines()[-5:]

    run, flowrl, lines, _, notes = last("s1")
    assert run.endswith("| ✓ᵃ |") and flowrl.endswith("| ✓ |") and lines == "| changed lines of verl | +2 −1 |"
    assert "ᵃ With vLLM as rollout." in notes
    assert all(row.endswith("| not run |") for row in last("s0")[:2])
    for stack, cell in {"s1": "✓ᵃ", "s0": "not run"}.items():
        lines = matrix.oat_table({"1.0": release()}, {"1.0": {"stack": stack, "rollout": "vLLM"}})
        assert f"\n| a whole job in fp16: launchpad, vLLM, DeepSpeed | {cell} |\n" in lines
        assert "\n| changed lines of OAT | +2 −1 |\n" in lines


def test_release_without_a_registry_has_no_recipe():
    name, *_ = matrix.WITHOUT_FLOWRL
    *_, flowrl, _, _, notes = matrix.table({name: release()}, {}).splitlines()
    assert flowrl.endswith("| –ᵃ |") and notes.endswith(f"ᵃ {matrix.WITHOUT_FLOWRL[name]}.")


@pytest.mark.parametrize("framework", RESULTS, ids=lambda framework: framework.name)
def test_results_match_the_current_stacks_and_every_behaviour_passed(framework: Framework):
    results = json.loads(RESULTS[framework].read_text())
    now = {stack.release.name: stack.id for stack in load_stacks(framework=framework)}
    recorded = {name: entry["stack"] for name, entry in results.items()}
    stale = sorted(name for name in now if recorded.get(name) != now[name])
    how = {VERL: "make test-releases matrix", OAT: "make test-oat matrix"}[framework]
    assert list(recorded) == list(now) and not stale, f"run `{how}`: the stacks of {', '.join(stale)} have changed"
    for name, entry in results.items():
        failed = [case for case, verdict in entry["seen"].items() if not verdict.get("passed", True)]
        assert not failed, f"{framework.name} {name}: {failed}"
        not_run = [case for case in entry["seen"].values() if "not_run" in case]
        assert not_run or framework != OAT, f"oat {name}: cases that did not run are recorded"


def test_readme_has_the_current_matrices():
    readme = matrix.README.read_text()
    assert readme == matrix.current(readme), "run `make matrix`"


def test_readme_without_markers_is_refused():
    with pytest.raises(SystemExit, match="has no lines <!-- OAT's, written by make matrix --> and <!-- end of OAT's"):
        matrix.written("", "oat", "")


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["verl"], 2)])
def test_words_and_help_write_nothing(words, code, tmp_path, monkeypatch, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(matrix.README.read_text().replace("°", ""))
    before = readme.read_bytes()
    monkeypatch.setattr(matrix, "README", readme)
    monkeypatch.setattr(sys, "argv", ["matrix.py", *words])
    with pytest.raises(SystemExit) as ended:
        matrix.main()
    assert ended.value.code == code and "usage: matrix.py [-h]" in "".join(capsys.readouterr())
    assert readme.read_bytes() == before
