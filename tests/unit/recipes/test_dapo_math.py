"""DAPO-Math-17k and AIME 2024, converted from the Hub's schema: each problem once, scored by verl itself."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from verl.utils.reward_score import default_compute_score


def row(problem: str, answer: str | None, number: int, **others) -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f'{problem}\n\nPut your answer after "Answer:".', "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(number)},
    } | others


def source(folder: Path, rows: list[dict]) -> Path:
    (folder / "data").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data" / "rows.parquet")
    return folder


def test_each_problem_is_kept_once_and_scored(tmp_path, prepare):
    three = [row("1+1?", "2", 0), row("2+2?", "4", 1), row("1+1?", "3", 2)]
    train = source(tmp_path / "train", three * 4000)  # more than are read at a time
    test = source(tmp_path / "test", [row("AIME?", "033", 0, raw_problem="AIME?")] * 32)
    done = prepare("dapo_math", "--out", tmp_path / "out", "--source", train, "--test-source", test)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{tmp_path}/out/train.parquet: 2 prompts; 1 occurred with another answer too; the first is kept",
        f"{tmp_path}/out/test.parquet: 1 prompts",
    ]
    assert pyarrow.parquet.read_table(tmp_path / "out/train.parquet").to_pylist() == three[:2]
    (problem,) = pyarrow.parquet.read_table(tmp_path / "out/test.parquet").to_pylist()
    assert problem == row("AIME?", "033", 0)
    for response, score in (("Answer: 033", 1), (r"So \boxed{033}", 1), ("Answer: 34", -1), ("033", -1)):
        assert default_compute_score("math_dapo", response, "033")["score"] == score


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"reward_model": {"ground_truth": None, "style": "rule"}}, "row 1: its ground truth is None, not a string"),
        (
            {"reward_model": {"ground_truth": "2\n3", "style": "rule"}},
            "row 1: verl scores its ground truth '2\\n3' as wrong",
        ),
        ({"data_source": "math_other"}, "row 1: Reward function is not implemented for data_source='math_other'"),
    ],
)
def test_unscorable_row_is_refused_in_one_line(bad, message, tmp_path, prepare):
    good = source(tmp_path / "good", [row("1+1?", "2", 0)])
    other = source(tmp_path / "other", [row("1+1?", "2", 0), row("2+2?", "4", 1, **bad)])
    done = prepare("dapo_math", "--out", tmp_path / "out", "--source", good, "--test-source", other)
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert done.stderr.splitlines()[-1] == f"--test-source {other}: {message}"


def test_other_and_missing_datasets_are_refused_in_one_line(tmp_path, prepare):
    lacking = source(tmp_path / "lacking", [{"prompt": [{"content": "1+1?", "role": "user"}], "data_source": "math"}])
    done = prepare("dapo_math", "--out", tmp_path / "out", "--source", lacking, "--test-source", lacking)
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    message = f"--source {lacking}: lacks the column 'ability'; it has prompt, data_source"
    assert done.stderr.splitlines()[-1] == message
    done = prepare("dapo_math", "--out", tmp_path / "out", "--source", tmp_path / "none", "--test-source", lacking)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(f"--source {tmp_path}/none: ")
