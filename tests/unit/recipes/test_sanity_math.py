"""The sanity test's MATH problems, converted from the Hub's schema for verl's own scorer and for OAT."""

import json
import os
import subprocess
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from support.recorded import every_release

from lib.patches.releases import OAT
from lib.patches.wheels import unpacked_wheel
from lib.paths import REPO
from verl.utils.reward_score import default_compute_score


def row(problem: str, answer: str | None) -> dict:
    """Return a row in the dataset's schema: a chat that asks for a box, and the ground truth."""
    return {
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"{problem} Put your final answer within \\boxed{{}}."}],
        "reward_model": {"ground_truth": answer, "style": "rule"},
    }


def source(folder: Path, rows: list[dict]) -> Path:
    for split, several in (("train", rows), ("test", [row("AIME?", "033")])):
        (folder / split).mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(several), folder / split / "rows.parquet")
    return folder


def test_problems_that_verl_cannot_score_are_left_out(tmp_path, prepare):
    unclosed = row("set?", r"\left\{1")  # its box does not close
    given = source(tmp_path / "given", [row("1/2?", r"\frac{1}{2}"), unclosed, row("2+2?", "4")])
    done = prepare("sanity_math", "--out", tmp_path / "out", "--source", given)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "out" / "train.parquet"
    summary = f"{file}: 2 problems; 1 left out, whose ground truth verl scores as wrong"
    assert done.stdout.splitlines()[-1] == summary
    assert done.stdout.splitlines()[0] == (
        f"{tmp_path}/out/oat: train: 2 problems; instruction removed: Put your final answer within \\boxed{{}}."
    )
    half, four = pyarrow.parquet.read_table(file).to_pylist()
    assert half["prompt"] == row("1/2?", "")["prompt"] and four["extra_info"] == {"index": 2}

    def score(answer: str) -> float:
        return default_compute_score(half["data_source"], answer, half["reward_model"]["ground_truth"])

    assert score(r"so \boxed{\frac12}") == score(r"no \boxed{3}, \boxed{1/2}") == 1
    assert score(r"so \boxed{2}") == score("so 1/2") == 0, "not -1: the mean is the accuracy"


READ = """
import json, sys
import oat_cpu
import oat.experiment.run_math_rl as math
import oat.utils.data as data

given, = sys.argv[1:]
splits = {split: list(rows) for split, rows in data.load_data_from_disk_or_hf(given).items()}
evaluated = math.ZeroMathLearner.eval_dataloader_collate_fn
math.args = math.ZeroMathArgs(prompt_template="r1_distill_qwen")
formatted, problems, answers = evaluated(None, splits["test"])
grade = math.r1_distill_qwen_math_reward_fn
graded = [grade(f"so</think> \\\\boxed{{{row['answer']}}}", row["answer"], fast=False)[1] for row in splits["train"]]
print(json.dumps([splits, formatted, problems, answers, graded]))
"""


@pytest.mark.releases
@pytest.mark.parametrize("release", every_release(OAT))
def test_oat_reads_the_same_problems_without_the_instruction(release, tmp_path, prepare):
    """Use the release's own loader, template, evaluation and grader."""
    given = source(tmp_path / "given", [row("1/2?", r"\frac{1}{2}"), row("set?", r"\left\{1"), row("2+2?", "4")])
    done = prepare("sanity_math", "--out", tmp_path / "out", "--source", given)
    assert done.returncode == 0, done.stderr
    tree = unpacked_wheel(release, tmp_path / "tree", OAT)
    paths = [tree, REPO / "tests/conformance/oat", REPO]
    read = subprocess.run(
        [REPO / ".venv-workers/bin/python", "-c", READ, tmp_path / "out/oat"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert read.returncode == 0, read.stderr[-3000:]
    splits, formatted, problems, answers, graded = json.loads(read.stdout.splitlines()[-1])
    assert splits["train"] == [{"problem": "1/2?", "answer": r"\frac{1}{2}"}, {"problem": "2+2?", "answer": "4"}]
    assert (problems, answers) == (["AIME?"], ["033"])
    asked = " Please reason step by step, and put your final answer within \\boxed{}.\n"
    assert formatted[0].endswith(f"<｜User｜>AIME?{asked}<｜Assistant｜><think>\n"), "asked for the box once"
    assert graded == [1.0, 1.0], "OAT's grader accepts the ground truths, too"


def test_unscorable_test_split_is_left_out(tmp_path, prepare):
    given = source(tmp_path / "given", [row("1/2?", r"\frac{1}{2}")])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row("AIME?", None)]), given / "test" / "rows.parquet")
    done = prepare("sanity_math", "--out", tmp_path / "out", "--source", given)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"{tmp_path}/out/oat: test: left out: row 0: its ground truth is None, not a string\n"
    )
    assert (tmp_path / "out/train.parquet").exists() and not (tmp_path / "out/oat/test").exists()


def test_prompts_without_common_instruction_are_unchanged(tmp_path, prepare):
    given = [row("", "4") | {"prompt": [{"role": "user", "content": problem}]} for problem in ("2+2?", "1+3?")]
    done = prepare("sanity_math", "--out", tmp_path / "out", "--source", source(tmp_path / "given", given))
    assert done.returncode == 0, done.stderr
    assert "oat: train: 2 problems; instruction removed: none in common" in done.stdout


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("2+2?", "4"), row("2+2?", None)], "row 1: its ground truth is None, not a string"),
        ([{"prompt": "2+2?", "answer": "4"}], "lacks the column 'reward_model'; it has prompt, answer"),
        ([row("set?", r"\left\{1")], "verl scores all its ground truths as wrong"),
    ],
)
def test_other_datasets_are_refused_in_one_line(rows, message, tmp_path, prepare):
    (tmp_path / "given" / "train").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "given" / "train" / "rows.parquet")
    done = prepare("sanity_math", "--out", tmp_path / "out", "--source", tmp_path / "given")
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert done.stderr.splitlines()[-1] == f"--source {tmp_path}/given: {message}"
