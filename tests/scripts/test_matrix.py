"""The support matrix in README.md is what the conformance suite saw of the stacks as they are now."""

import json

import pytest

import matrix
from lib.stack import load_stacks


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
    ],
)
def test_a_cell_says_what_was_seen(cases, cell):
    lines = matrix.table({"1.0": release(*cases)}, {}).splitlines()
    assert lines[0] == "|  | 1.0 |" and f"| a behaviour | {cell} |" in lines
    assert lines[-1].endswith("ᵃ No such thing there.") == ("absent" in cases[0])


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


def test_the_results_are_those_of_the_stacks():
    results = json.loads(matrix.RESULTS.read_text())
    stale = {stack.release.name for stack in load_stacks() if results[stack.release.name]["stack"] != stack.id}
    assert not stale, f"run `make test-releases matrix`: the stacks of {', '.join(sorted(stale))} have changed"


def test_the_readme_has_the_matrix():
    readme = matrix.README.read_text()
    results = (json.loads(file.read_text()) for file in (matrix.RESULTS, matrix.RUNS))
    current = matrix.written(readme, matrix.table(*results))
    assert readme == current, "run `make matrix`"


def test_every_behaviour_was_seen():
    for name, entry in json.loads(matrix.RESULTS.read_text()).items():
        failed = [case for case, verdict in entry["seen"].items() if "absent" not in verdict and not verdict["passed"]]
        assert not failed, f"verl {name}: {failed}"
