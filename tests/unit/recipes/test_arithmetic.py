"""The two tasks: their rules, their model and their preparation."""

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pyarrow.parquet
import pytest
from support.waiting import TIMEOUT_S, wait_until

from recipes.arithmetic import addition, families, prepare, terms
from verl_precision.paths import REPO

SHORT = prepare.PreparationSettings("addition", seed=1, steps=3)
TASKS = list(prepare.TASKS)


def test_reward_depends_on_the_text_after_the_last_equals_sign():
    right = ["400:04,020:02,720:09=0924", "=0924"]
    wrong = ["400:04,020:02,720:09=0925", "400:04,020:02,720:09=924", "=0924=", "0924", ""]
    scores = {text: addition.compute_score("addition", text, addition.answer(704, 220)) for text in right + wrong}
    assert scores == dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)


def test_terms_that_add_up_are_right_and_equal_answers_have_one_name():
    right = {"12+35": "12+35", "35+12": "12+35", "07+40": "7+40", "7+40": "7+40", "40+07": "7+40", "00+47": "0+47"}
    wrong = {"12+36": "12+36", "12+35+0": "", "47": "", "-1+48": "", "12+35=": "", "": ""}
    expected = {response: {"score": 1.0, "answer": answer} for response, answer in right.items()}
    expected |= {response: {"score": 0.0, "answer": answer} for response, answer in wrong.items()}
    assert {response: terms.compute_score("terms", response, terms.answer(47)) for response in expected} == expected


@pytest.mark.parametrize("name", TASKS)
def test_demonstration_solves_its_problem_and_errs_at_times_if_corrupted(name):
    task, rng = prepare.TASKS[name], random.Random(0)
    edges = {"addition": [(0, 0), (999, 999), (704, 220), (95, 7)], "terms": [(10,), (99,), (90,)]}[name]
    for problem in [*edges, *task.problems(50, rng)]:
        text = task.demonstration(*problem, rng)
        assert prepare.score(task, text, problem) == 1.0
        assert len(text) + 1 == task.RESPONSE_LENGTH and len(task.prompt(*problem)) + 1 == task.PROMPT_LENGTH
    problems = [problem for _ in range(500) for problem in task.problems(1, rng)]
    scores = [prepare.score(task, task.demonstration(*problem, rng, 0.25), problem) for problem in problems]
    assert 0.3 < sum(scores) / len(scores) < 0.7  # 0.75 ** 3 = 0.42; (0.75 + 0.25 / 10) ** 2 = 0.60


def test_demonstrations_of_terms_have_many_answers_some_more_likely_than_others():
    rng = random.Random(0)
    texts = [terms.demonstration(47, rng) for _ in range(2000)]
    counts = Counter(terms.compute_score("", text, "47")["answer"] for text in texts)
    assert len(counts) == 5 * 8 / 2, "without a carry: 5 ways to write 4, 8 to write 7"
    assert max(counts.values()) > 2 * min(counts.values()) and max(counts.values()) < len(texts) / 5


@pytest.mark.parametrize("name", TASKS)
def test_data_have_verls_schema_and_no_problem_is_in_both_files(name, tmp_path):
    prepare.write_data(tmp_path, replace(SHORT, task=name))
    prompts = {}
    for split in ("train", "val"):
        rows = pyarrow.parquet.read_table(tmp_path / f"{split}.parquet").to_pylist()
        prompts[split] = {row["prompt"][0]["content"] for row in rows}
        assert len(rows) == prepare.TASKS[name].PROBLEMS
        for index, row in enumerate(rows):
            (message,) = row["prompt"]
            total = sum(map(int, message["content"].rstrip("=").split("+")))
            truth = {"addition": f"{total:04d}", "terms": str(total)}[name]
            assert row["reward_model"] == {"style": "rule", "ground_truth": truth}
            assert row["extra_info"] == {"split": split, "index": index} and row["data_source"] == name
    assert not prompts["train"] & prompts["val"]


def test_useless_model_and_another_folder_are_refused(tmp_path):
    with pytest.raises(prepare.PreparationError, match=r"sampled accuracy 0.00 .* within 0.20 and 0.80"):
        prepare.prepare(tmp_path / "made", SHORT)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(prepare.PreparationError, match="is not empty"):
        prepare.prepare(tmp_path, SHORT)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_family_has_the_tasks_vocabulary(family):
    tokenizer = families.build_tokenizer(family)
    config = families.build_model(family, tokenizer, seed=1).config
    assert config.model_type == family and config.vocab_size == len(tokenizer)
    assert config.tie_word_embeddings == family.startswith(("gemma", "gpt2"))
    if family in ("gemma2", "gemma3_text"):
        assert config.layer_types == ["sliding_attention", "full_attention"]


@pytest.mark.subprocess  # prepares four times
def test_finished_folder_is_reused_only_with_the_same_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "ACCURACY_BAND", (0.0, 1.0))  # three steps are too few to learn
    made = prepare.prepare(tmp_path / "made", SHORT)
    stamp, weights = tmp_path / "made/prepared.json", tmp_path / "made/model/model.safetensors"
    written, bits = stamp.stat().st_mtime_ns, weights.read_bytes()
    assert prepare.prepare(tmp_path / "made", SHORT) == made and stamp.stat().st_mtime_ns == written
    for other in (replace(SHORT, seed=2), replace(SHORT, family="llama"), SHORT):
        again = prepare.prepare(tmp_path / "made", other)
        assert again["key"] != made["key"] and json.loads(stamp.read_text()) == again
        assert (weights.read_bytes() == bits) == (other == SHORT), "the weights depend only on seed and family"
        assert json.loads((tmp_path / "made/model/config.json").read_text())["model_type"] == other.family
        made = again


@pytest.mark.subprocess
def test_interrupted_preparation_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "recipes.arithmetic.prepare", "--out", tmp_path / "made", "--seed", "1"]
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: process.poll() is not None or list(tmp_path.iterdir()), "the preparation's begin")
    process.terminate()
    assert process.wait(TIMEOUT_S) != 0
    assert list(tmp_path.iterdir()) == []
