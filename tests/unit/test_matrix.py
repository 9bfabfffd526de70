"""The cells of the support matrices, whose pages match the recorded results."""

import pytest
from support import matrix


def case(upstream_has_it: bool = False, **verdict) -> dict:
    return {"row": "a behaviour", "upstream_has_it": upstream_has_it, **verdict}


def release(*cases: dict) -> dict:
    seen = {str(number): case for number, case in enumerate(cases)}
    return {"stack": "s1", "lines": {"added": 2, "removed": 1}, "seen": seen}


@pytest.mark.parametrize(
    ("cases", "cell"),
    [
        ([case(passed=True, upstream_has_it=True)], "✓°"),
        ([case(passed=True, upstream_has_it=True), case(passed=True)], "✓(°)"),
        ([case(passed=True), case(passed=False)], "**fails**"),
        ([case(absent="no such thing there")], "–ᵃ"),
        ([case(not_run="no such thing here")], "not runᵃ"),
        ([case(passed=True), case(not_run="no such thing here")], "✓, in part not runᵃ"),
    ],
)
def test_cell_marks_the_outcome(cases, cell):
    results = {"1.0": release(*cases), "1.1": release(*cases)}
    for lines in (matrix.table(framework, results, {}) for framework in matrix.PAGES):
        assert lines.startswith("|  | 1.0 | 1.1 |\n") and f"\n| a behaviour | {cell} | {cell} |\n" in lines
        notes = lines.partition(matrix.LEGEND)[2].split("\n- ᵇ: ")[0]
        assert ("ᵃ" in cell) == notes.startswith("\n- ᵃ: No such thing ")


def test_run_counts_only_for_its_stack():
    def last(stack: str) -> list[str]:
        alike = {"stack": stack, "metrics": 9, "files": 8, "config": 7, "lines": 6}
        runs = {"1.0": {"stack": stack, "rollout": "vLLM", "flowrl": {"stack": stack}, "unrequested": alike}}
        table, _, notes = matrix.table("verl", {"1.0": release()}, runs).partition(f"\n\n{matrix.LEGEND}\n")
        return [*table.splitlines()[-4:], notes]

    run, alike, flowrl, lines, notes = last("s1")
    assert run.endswith("| ✓ᵃ |") and alike.endswith("| ✓ᵇ |") and flowrl.endswith("| ✓ |")
    assert lines == "| changed lines of verl | +2 −1 |"
    assert notes.startswith("- ᵃ: Rollout: vLLM.\n- ᵇ: 9 metrics, 8 files, 7 settings, 6 lines.\n")
    assert all(row.endswith("| not run |") for row in last("s0")[:3])
    for stack, cell in {"s1": "✓ᵃ", "s0": "not run"}.items():
        lines = matrix.table("oat", {"1.0": release()}, {"1.0": {"stack": stack, "rollout": "vLLM"}})
        assert f"\n| a whole job runs in fp16: launchpad, vLLM, DeepSpeed | {cell} |\n" in lines
        assert "\n| changed lines of OAT | +2 −1 |\n" in lines
    name, *_ = matrix.WITHOUT_FLOWRL
    page = matrix.table("verl", {name: release()}, {})
    assert "\n| the FlowRL recipe runs two steps in fp16 | –ᵃ |\n" in page
    assert page.endswith(f"\n- ᵃ: {matrix.WITHOUT_FLOWRL[name]}.\n")


def test_pages_are_current(monkeypatch, tmp_path):
    assert {name: page.read_text() for name, page in matrix.PAGES.items()} == matrix.pages(), "run `make matrix`"
    monkeypatch.setattr(matrix, "PAGES", {name: tmp_path / name for name in matrix.PAGES})
    matrix.main()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == matrix.pages()
