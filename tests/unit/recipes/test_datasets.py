"""The datasets of mathematics, converted from the Hub's schema and scored by verl itself: GSM8K, DAPO-Math-17k with
AIME 2024, and the sanity test's MATH problems, which OAT reads too."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from support.selected import every_release

from verl.utils.reward_score import default_compute_score
from verl_precision.patch.releases import OAT
from verl_precision.patch.wheels import unpacked_wheel
from verl_precision.paths import REPO

BOX = " Put your final answer within \\boxed{}."
HALF, UNCLOSED = ("1/2?", r"\frac{1}{2}"), ("set?", r"\left\{1")  # the second's box does not close


@pytest.fixture
def prepare(monkeypatch, capsys, tmp_path) -> Callable[..., SimpleNamespace]:
    """``prepare("dapo_math", "--source", folder, …)``: a recipe's command, run in this process without the Hub.

    It writes to ``tmp_path/out``; the outcome has ``refusal``, None if it succeeded, and the lines of its output.
    """
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(recipe: str, *words: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["prepare", "--out", str(tmp_path / "out"), *map(str, words)])
        refusal = None
        try:
            importlib.import_module(f"recipes.{recipe}.prepare").main()
        except SystemExit as end:
            refusal = end.code
        assert not (refusal and (tmp_path / "out").exists()), "a refusal writes nothing"
        return SimpleNamespace(refusal=refusal, lines=capsys.readouterr().out.splitlines())

    return run


def row(problem: str, answer: str | None, instruction: str = BOX) -> dict:
    """Return a row in the schema of both: a chat that ends with the instruction, and the ground truth."""
    return {
        "data_source": "math",
        "prompt": [{"role": "user", "content": f"{problem}{instruction}"}],
        "reward_model": {"ground_truth": answer, "style": "rule"},
    }


def dapo(problem: str, answer: str | None, number: int, **others) -> dict:
    further = {"data_source": "math_dapo", "ability": "MATH", "extra_info": {"index": str(number)}}
    return row(problem, answer, '\n\nPut your answer after "Answer:".') | further | others


def write(folder: Path, **splits: list[dict]) -> Path:
    """Write a dataset's splits as the Hub has them."""
    for split, rows in splits.items():
        (folder / split).mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / split / "rows.parquet")
    return folder


def read(file: Path) -> list[dict]:
    return pyarrow.parquet.read_table(file).to_pylist()


def write_gsm8k(folder: Path, **answers: str) -> Path:
    """Write GSM8K's own layout on the Hub: a configuration called "main" with two splits."""
    files = [{"split": split, "path": f"{split}.jsonl"} for split in answers]
    folder.mkdir()
    configs = json.dumps([{"config_name": "main", "data_files": files}])
    (folder / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    for split, answer in answers.items():
        (folder / f"{split}.jsonl").write_text(json.dumps({"question": "How many?", "answer": answer}) + "\n")
    return folder


def test_gsm8k_is_converted_and_scored(tmp_path, prepare):
    source = write_gsm8k(tmp_path / "others", train="#### 1", test="3")
    refusal = f"--source {source}: test row 0: the answer has no number after ####"
    assert prepare("gsm8k", "--source", source).refusal == refusal
    source = write_gsm8k(tmp_path / "gsm8k", train="She has 3 * 400 = <<3*400=1200>>1200.\n#### 1,200", test="#### -3")
    assert prepare("gsm8k", "--source", source).refusal is None
    for split, truth in (("train", "1200"), ("test", "-3")):
        (row,) = read(tmp_path / "out" / f"{split}.parquet")
        assert row["prompt"][0]["role"] == "user" and row["prompt"][0]["content"].startswith("How many? ")
        assert row["reward_model"] == {"style": "rule", "ground_truth": truth}
        assert row["extra_info"] == {"split": split, "index": 0}
        scores = {f"So it is\n#### {truth}": 1, "So it is\n#### 7": 0, truth: 0}
        assert {text: default_compute_score(row["data_source"], text, truth) for text in scores} == scores
        assert "####" in row["prompt"][0]["content"], "an answer without it is wrong"


def test_each_problem_of_dapo_is_kept_once_and_scored(tmp_path, prepare):
    three = [dapo("1+1?", "2", 0), dapo("2+2?", "4", 1), dapo("1+1?", "3", 2)]
    train = write(tmp_path / "train", train=three * 4000)  # more than are read at a time
    test = write(tmp_path / "test", train=[dapo("AIME?", "033", 0, raw_problem="AIME?")] * 32)
    done = prepare("dapo_math", "--source", train, "--test-source", test)
    assert done.lines == [
        f"{tmp_path}/out/train.parquet: 2 prompts",
        f"{tmp_path}/out/test.parquet: 1 prompts",
    ]
    assert read(tmp_path / "out/train.parquet") == three[:2]
    assert read(tmp_path / "out/test.parquet") == [dapo("AIME?", "033", 0)]
    for response, score in (("Answer: 033", 1), (r"So \boxed{033}", 1), ("Answer: 34", -1), ("033", -1)):
        assert default_compute_score("math_dapo", response, "033")["score"] == score


def test_sanity_problems_that_verl_cannot_score_are_left_out(tmp_path, prepare):
    rows = [row(*HALF), row(*UNCLOSED), row("2+2?", "4")]
    done = prepare("sanity_math", "--source", write(tmp_path / "given", train=rows, test=[row("AIME?", None)]))
    assert done.lines == [
        f"{tmp_path}/out/oat: test: left out: row 0: its ground truth is None, not a string",
        f"{tmp_path}/out/oat: train: 2 problems; instruction removed:{BOX}",
        f"{tmp_path}/out/train.parquet: 2 problems; 1 left out, whose ground truth verl scores as wrong",
    ]
    assert not (tmp_path / "out/oat/test").exists()
    half, four = read(tmp_path / "out/train.parquet")
    assert half["prompt"] == row(*HALF)["prompt"] and four["extra_info"] == {"index": 2}

    def score(answer: str) -> float:
        return default_compute_score(half["data_source"], answer, half["reward_model"]["ground_truth"])

    assert score(r"so \boxed{\frac12}") == score(r"no \boxed{3}, \boxed{1/2}") == 1
    assert score(r"so \boxed{2}") == score("so 1/2") == 0, "not -1: the mean is the accuracy"


def test_sanity_prompts_without_common_instruction_are_unchanged(tmp_path, prepare):
    rows = [row(problem, "4", instruction="") for problem in ("2+2?", "1+3?")]
    done = prepare("sanity_math", "--source", write(tmp_path / "given", train=rows))
    assert done.lines[0].endswith("oat: train: 2 problems; instruction removed: none in common")


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
@pytest.mark.subprocess
@pytest.mark.parametrize("release", every_release(OAT))
def test_oat_reads_the_same_problems_without_the_instruction(release, tmp_path, prepare):
    """Use the release's own loader, template, evaluation and grader."""
    rows = [row(*HALF), row(*UNCLOSED), row("2+2?", "4")]
    prepare("sanity_math", "--source", write(tmp_path / "given", train=rows, test=[row("AIME?", "033")]))
    tree = unpacked_wheel(release, tmp_path / "tree", OAT)
    paths = [tree, REPO / "tests/conformance/oat", REPO]
    done = subprocess.run(
        [REPO / ".venv-workers/bin/python", "-c", READ, tmp_path / "out/oat"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    splits, formatted, problems, answers, graded = json.loads(done.stdout.splitlines()[-1])
    train = {problem["problem"]: problem["answer"] for problem in splits["train"]}
    assert train == dict([HALF, ("2+2?", "4")]) and (problems, answers) == (["AIME?"], ["033"])
    asked = " Please reason step by step, and put your final answer within \\boxed{}.\n"
    assert formatted[0].endswith(f"<｜User｜>AIME?{asked}<｜Assistant｜><think>\n"), "asked for the box once"
    assert graded == [1.0, 1.0], "OAT's grader accepts the ground truths, too"


MISSING, LACKING = "its ground truth is None, not a string", {"prompt": "2+2?", "answer": "4"}
WRONG, OTHER = dapo("2?", "2\n3", 1), dapo("2?", "2", 1, data_source="math_other")
# The recipe, the option that names the dataset, its rows, and the refusal.
REFUSED = [
    ("dapo_math", "--test-source", [dapo("1?", "1", 0), dapo("2?", None, 1)], f"row 1: {MISSING}"),
    ("dapo_math", "--test-source", [WRONG], "row 0: verl scores its ground truth '2\\n3' as wrong"),
    ("dapo_math", "--test-source", [OTHER], "Reward function is not implemented for data_source='math_other'"),
    ("dapo_math", "--source", [LACKING], "lacks the column 'data_source'; it has prompt, answer"),
    ("dapo_math", "--source", [], ""),  # no such dataset; the reason is the library's
    ("sanity_math", "--source", [row("2+2?", "4"), row("2+2?", None)], f"row 1: {MISSING}"),
    ("sanity_math", "--source", [LACKING], "lacks the column 'reward_model'; it has prompt, answer"),
    ("sanity_math", "--source", [row(*UNCLOSED)], "verl scores all its ground truths as wrong"),
]


@pytest.mark.parametrize(
    ("recipe", "given", "default"),
    [
        ("gsm8k", "", "--source openai/gsm8k"),
        ("sanity_math", "", "--source sail/Sanity-Test-R1D-1.5B"),
        ("dapo_math", "", "--source BytedTsinghua-SIA/DAPO-Math-17k"),
        ("dapo_math", "--source", "--test-source BytedTsinghua-SIA/AIME-2024"),
    ],
)
def test_dataset_on_the_hub_is_the_default(recipe, given, default, tmp_path, prepare):
    """Its name is in the refusal: no Hub can be reached here."""
    words = (given, write(tmp_path / "given", train=[dapo("1+1?", "2", 0)])) if given else ()
    assert prepare(recipe, *words).refusal.startswith(f"{default}: ")


@pytest.mark.parametrize(("recipe", "option", "rows", "message"), REFUSED)
def test_other_and_unscorable_datasets_are_refused_in_one_line(recipe, option, rows, message, tmp_path, prepare):
    good, given = write(tmp_path / "good", train=[dapo("1+1?", "2", 0)]), tmp_path / "given"
    if rows:
        write(given, train=rows)
    sources = {"--source": good, "--test-source": good} if recipe == "dapo_math" else {}
    words = (sources | {option: given}).items()
    done = prepare(recipe, *(word for pair in words for word in pair))
    assert done.refusal.startswith(f"{option} {given}: {message}") and "\n" not in done.refusal
    assert done.refusal.endswith(message)
