"""The right answers of finished runs, by the command ``diversity``."""

import json
import shlex
from pathlib import Path

import pytest
from support.report_runs import finished_run

from verl_precision.commands import diversity
from verl_precision.errors import Refused

Answers = dict[str, list[tuple[str, float]]]  # by prompt the answers and their scores
BEFORE = {"47=": [("7+40", 1.0), ("12+35", 1.0), ("1+1", 0.0), ("", 0.0)], "12=": [("6+6", 1.0)] * 2 + [("", 0.0)] * 2}
ONE = {"47=": [("7+40", 1.0)] * 4, "12=": [("6+6", 1.0)] * 4}
MANY = {"47=": [("7+40", 1.0)] * 3 + [("12+35", 1.0)], "12=": [("6+6", 1.0)] * 3 + [("", 0.0)]}


def validated(out: Path, steps: dict[int, Answers]) -> Path:
    """Make a finished run's folder with the files of its validations, as verl's trainer writes them."""
    (finished_run(out, "SEED=3") / "validation").mkdir()
    for number, step in steps.items():
        rows = [
            {"input": prompt, "output": f"text {answer}", "score": score, "step": number, "answer": answer}
            for prompt, answers in step.items()
            for answer, score in answers
        ]
        (out / f"validation/{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def test_right_answers_are_counted_in_the_validations(tmp_path, capsys):
    one, many = (validated(tmp_path / name, {0: BEFORE, 10: last}) for name, last in (("one", ONE), ("many", MANY)))
    out = tmp_path / "both"
    diversity.main([f"RUNS=one={one} many={many}", f"OUT={out}"])
    content = json.loads(out.with_suffix(".json").read_text())
    assert (content["prompts"], content["samples"]) == (2, 4)
    one, many = (run["steps"] for run in content["runs"])
    before, after = many["0"], many["10"]
    assert one["0"] == before and (before["accuracy"], before["distinct_right_answers"]) == (0.5, 1.5)
    assert one["10"] == dict.fromkeys(after, 1.0)
    assert (after["accuracy"], after["distinct_right_answers"]) == (7 / 8, 1.5)
    assert after["effective_right_answers"] == pytest.approx((4 / 3**0.75 + 1) / 2), "of 3/4 and 1/4, and of 1"
    shares = {"before": {"7+40": 0.5, "12+35": 0.5}, "one": {"7+40": 1.0}, "many": {"7+40": 0.75, "12+35": 0.25}}
    assert content["shares_of_right_answers"]["47="] == shares
    assert content["runs"][0]["asked"]["SEED"] == 3
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "one                  step  10: 1 accuracy, 1 distinct right answers" in capsys.readouterr().out


def test_text_counts_if_the_reward_function_returns_no_answer(tmp_path):
    folder = validated(tmp_path / "run", {0: BEFORE, 10: MANY})
    for file in (folder / "validation").iterdir():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "answer"}) + "\n" for row in rows))
    assert diversity.read_validations(folder)[10]["47="] == ["text 7+40"] * 3 + ["text 12+35"]


BOTH = {0: BEFORE, 10: MANY}
FEWER = {prompt: answers[:2] for prompt, answers in MANY.items()}


@pytest.mark.parametrize(
    ("steps", "words", "message"),
    [
        ({0: BEFORE}, "RUNS=a={tmp}/a OUT={tmp}/out", "has no validations before and after training"),
        ({0: BEFORE, 10: FEWER}, "RUNS='a={tmp}/a b={tmp}/b' OUT={tmp}/out", "must have the same prompts"),
        (BOTH, "RUNS=a={tmp} OUT={tmp}/out", "is not the folder of a finished run"),
        (BOTH, "OUT={tmp}/out", "RUNS: is not set"),
        (BOTH, "RUNS=a={tmp}/a", "OUT: is not set"),
        (BOTH, "a={tmp}/a", "is not a variable"),
    ],
)
def test_bad_words_and_runs_are_refused_and_nothing_is_written(steps, words, message, tmp_path):
    folders = [validated(tmp_path / "a", steps), validated(tmp_path / "b", BOTH)]
    with pytest.raises(Refused, match=message):
        diversity.main(shlex.split(words.format(tmp=tmp_path)))
    assert sorted(tmp_path.iterdir()) == folders
