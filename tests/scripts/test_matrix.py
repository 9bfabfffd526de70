"""The support matrices in README.md are what the suites saw of the stacks as they are now."""

import json
import sys

import pytest

import matrix
from lib.patches.releases import OAT, VERL, Framework
from lib.patches.stack import load_stacks

RESULTS = {VERL: matrix.RESULTS, OAT: matrix.OAT_RESULTS}


def seen(upstream_has_it: bool = False, **verdict) -> dict:
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
        ([seen(passed=True)], "✓"),
        ([seen(passed=True, upstream_has_it=True)], "✓°"),
        ([seen(passed=True, upstream_has_it=True), seen(passed=True)], "✓(°)"),
        ([seen(passed=True), seen(passed=False)], "**fails**"),
        ([seen(absent="no such thing there")], "–ᵃ"),
        ([seen(not_run="no such thing here")], "not runᵃ"),
        ([seen(passed=True), seen(not_run="no such thing here")], "✓, in part not runᵃ"),
        ([seen(absent="no such thing there"), seen(not_run="no such thing here")], "not runᵃ"),
    ],
)
def test_a_cell_says_what_was_seen(cases, cell):
    for lines in (matrix.table({"1.0": release(*cases)}, {}), matrix.oat_table({"1.0": release(*cases)}, {})):
        assert lines.startswith("|  | 1.0 |\n") and f"\n| a behaviour | {cell} |\n" in lines
        notes = lines.splitlines()[-1].removeprefix(matrix.LEGEND).split(" ᵇ ")[0]
        assert ("ᵃ" in cell) == notes.startswith(" ᵃ No such thing ")


def test_a_run_counts_for_its_stack_alone():
    def last(stack: str) -> list[str]:
        runs = {"1.0": {"stack": stack, "rollout": "vLLM", "flowrl": {"stack": stack}}}
        return matrix.table({"1.0": release()}, runs).splitlines()[-5:]

    run, flowrl, lines, _, notes = last("s1")
    assert run.endswith("| ✓ᵃ |") and flowrl.endswith("| ✓ |") and lines == "| changed lines of verl | +2 −1 |"
    assert "ᵃ With vLLM as rollout." in notes
    assert all(row.endswith("| not run |") for row in last("s0")[:2])


def test_a_release_without_a_registry_has_no_recipe():
    *_, flowrl, _, _, notes = matrix.table({"0.8.0": release()}, {}).splitlines()
    assert flowrl.endswith("| –ᵃ |") and notes.endswith(f"ᵃ {matrix.WITHOUT_FLOWRL['0.8.0']}.")


def test_a_run_of_oat_counts_for_its_stack_alone():
    for stack, cell in {"s1": "✓ᵃ", "s0": "not run"}.items():
        lines = matrix.oat_table({"1.0": release()}, {"1.0": {"stack": stack, "rollout": "vLLM"}})
        assert f"\n| a whole job in fp16: launchpad, vLLM, DeepSpeed | {cell} |\n" in lines
        assert "\n| changed lines of OAT | +2 −1 |\n" in lines


@pytest.mark.parametrize("framework", RESULTS, ids=lambda framework: framework.name)
def test_the_results_are_those_of_the_stacks(framework: Framework):
    results = json.loads(RESULTS[framework].read_text())
    now = {stack.release.name: stack.id for stack in load_stacks(framework=framework)}
    seen = {name: entry["stack"] for name, entry in results.items()}
    stale = sorted(name for name in now if seen.get(name) != now[name])
    how = {VERL: "make test-releases matrix", OAT: "make test-oat matrix"}[framework]
    assert list(seen) == list(now) and not stale, f"run `{how}`: the stacks of {', '.join(stale)} have changed"


def test_the_readme_has_the_matrices():
    readme = matrix.README.read_text()
    assert readme == matrix.current(readme), "run `make matrix`"


@pytest.mark.parametrize("framework", RESULTS, ids=lambda framework: framework.name)
def test_every_behaviour_was_seen(framework: Framework):
    for name, entry in json.loads(RESULTS[framework].read_text()).items():
        failed = [case for case, verdict in entry["seen"].items() if not verdict.get("passed", True)]
        assert not failed, f"{framework.name} {name}: {failed}"


def test_what_could_not_be_run_is_said():
    for name, entry in json.loads(matrix.OAT_RESULTS.read_text()).items():
        assert [case for case in entry["seen"].values() if "not_run" in case], f"oat {name}"


def test_a_readme_without_markers():
    with pytest.raises(SystemExit, match="has no lines <!-- OAT's, written by make matrix --> and <!-- end of OAT's"):
        matrix.written("", "oat", "")


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["verl"], 2)])
def test_the_readme_is_written_without_arguments_alone(words, code, tmp_path, monkeypatch, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(matrix.README.read_text().replace("°", ""))
    before = readme.read_bytes()
    monkeypatch.setattr(matrix, "README", readme)
    monkeypatch.setattr(sys, "argv", ["matrix.py", *words])
    with pytest.raises(SystemExit) as ended:
        matrix.main()
    assert ended.value.code == code and "usage: matrix.py [-h]" in "".join(capsys.readouterr())
    assert readme.read_bytes() == before
