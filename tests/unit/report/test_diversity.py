"""The right answers of finished runs, by ``scripts/diversity.py``."""

import json
from pathlib import Path

import pytest
from support.report_runs import finished_run

import diversity
from lib.errors import Refused

Answers = dict[str, list[tuple[str, float]]]  # by prompt the answers and their scores
BEFORE = {"47=": [("7+40", 1.0), ("12+35", 1.0), ("1+1", 0.0), ("", 0.0)], "12=": [("6+6", 1.0)] * 2 + [("", 0.0)] * 2}
ONE = {"47=": [("7+40", 1.0)] * 4, "12=": [("6+6", 1.0)] * 4}
MANY = {"47=": [("7+40", 1.0), ("12+35", 1.0)] * 2, "12=": [("6+6", 1.0)] * 3 + [("", 0.0)]}


def validated(out: Path, steps: dict[int, Answers]) -> Path:
    """Make a finished run's folder with the files of its validations, as verl's trainer writes them."""
    (finished_run(out, "SEED=3") / "validation").mkdir()
    for number, step in steps.items():
        rows = [
            {"input": prompt, "output": f"text {answer}", "score": score, "step": number, "answer": answer}
            for prompt, answers in step.items()
            for answer, score in answers
        ]
        (out / "validation" / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def test_right_answers_are_counted_in_the_validations(tmp_path, capsys):
    one, many = (validated(tmp_path / name, {0: BEFORE, 10: last}) for name, last in (("one", ONE), ("many", MANY)))
    out = tmp_path / "both"
    diversity.main([f"RUNS=one={one} many={many}", f"OUT={out}"])
    content = json.loads(out.with_suffix(".json").read_text())
    assert (content["prompts"], content["samples"]) == (2, 4)
    steps = {run["label"]: run["steps"] for run in content["runs"]}
    for label in steps:
        assert steps[label]["0"]["accuracy"] == 0.5 and steps[label]["0"]["distinct_right_answers"] == 1.5
    assert steps["one"]["10"] == dict.fromkeys(steps["one"]["10"], 1.0)
    assert steps["many"]["10"]["accuracy"] == 7 / 8 and steps["many"]["10"]["distinct_right_answers"] == 1.5
    assert steps["many"]["10"]["effective_right_answers"] == pytest.approx(1.5)
    assert content["shares_of_right_answers"]["47="] == {
        "before": {"7+40": 0.5, "12+35": 0.5},
        "one": {"7+40": 1.0},
        "many": {"7+40": 0.5, "12+35": 0.5},
    }
    assert content["runs"][0]["asked"]["SEED"] == 3
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "one                  step  10: 1 accuracy, 1 distinct right answers" in capsys.readouterr().out


def test_text_counts_if_the_reward_function_returns_no_answer(tmp_path):
    folder = validated(tmp_path / "run", {0: BEFORE, 10: MANY})
    for file in (folder / "validation").iterdir():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "answer"}) + "\n" for row in rows))
    assert diversity.read_validations(folder)[10]["47="] == ["text 7+40", "text 12+35"] * 2


@pytest.mark.parametrize("steps", [{}, {0: BEFORE}, {10: MANY}])
def test_run_without_validations_before_and_after_is_refused(steps, tmp_path):
    folder = validated(tmp_path / "run", steps)
    with pytest.raises(Refused, match="has no validations before and after training"):
        diversity.main([f"RUNS=run={folder}", f"OUT={tmp_path}/out"])
    assert list(tmp_path.iterdir()) == [folder]


def test_runs_with_different_prompts_are_refused(tmp_path):
    folders = [
        validated(tmp_path / "a", {0: BEFORE, 10: MANY}),
        validated(tmp_path / "b", {0: BEFORE, 10: {prompt: answers[:2] for prompt, answers in MANY.items()}}),
    ]
    with pytest.raises(Refused, match="must have the same prompts, with as many samples to each"):
        diversity.main([f"RUNS={' '.join(f'run={folder}' for folder in folders)}", f"OUT={tmp_path}/out"])
    assert sorted(tmp_path.iterdir()) == folders


def test_unfinished_run_and_missing_words_are_refused(tmp_path):
    folder = validated(tmp_path / "run", {0: BEFORE, 10: MANY})
    (folder / "summary.json").unlink()
    for words, message in (
        ([f"RUNS=run={folder}", f"OUT={tmp_path}/out"], "is not the folder of a finished run"),
        ([f"OUT={tmp_path}/out"], "RUNS: is missing"),
        ([f"RUNS=run={folder}"], "OUT: is missing"),
        ([str(tmp_path), f"run={folder}"], "is not a variable"),
    ):
        with pytest.raises(Refused, match=message):
            diversity.main(words)
    assert list(tmp_path.iterdir()) == [folder]


def test_help_shows_the_usage(capsys):
    diversity.main(["--help"])
    assert 'RUNS="LABEL=FOLDER …" OUT=FILE' in capsys.readouterr().out
