"""The sanity task: its rule, its model and its preparation."""

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

from recipes.arithmetic import prepare, task
from recipes.arithmetic.model import build_model, build_tokenizer

REPO = Path(__file__).resolve().parents[2]
SHORT = prepare.Settings(seed=1, steps=3)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("400:04,020:02,720:09=0924", 1.0),
        ("=0924", 1.0),
        ("400:04,020:02,720:09=0925", 0.0),
        ("400:04,020:02,720:09=924", 0.0),
        ("=0924=", 0.0),
        ("0924", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_a_rule_on_the_text_after_the_last_equals_sign(response, score):
    assert task.compute_score("arithmetic", response, task.answer(704, 220)) == score


def test_a_demonstration_solves_its_problem_and_has_the_stated_length():
    rng = random.Random(0)
    for a, b in [(0, 0), (999, 999), (704, 220), (95, 7), *task.problems(50, rng)]:
        text = task.demonstration(a, b, rng)
        assert task.compute_score("", text, task.answer(a, b)) == 1.0
        assert len(text) + 1 == task.RESPONSE_LENGTH and len(task.prompt(a, b)) + 1 == task.PROMPT_LENGTH


def test_a_corrupted_demonstration_errs_at_times():
    rng = random.Random(0)
    pairs = task.problems(500, rng)
    scores = [task.compute_score("", task.demonstration(a, b, rng, 0.25), task.answer(a, b)) for a, b in pairs]
    assert 0.3 < sum(scores) / len(scores) < 0.6  # 0.75 ** 3 = 0.42


def test_the_tokenizer_is_the_models_vocabulary_and_round_trips():
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    assert model.config.vocab_size == len(tokenizer) == model.lm_head.out_features
    for text in ("704+220=", "400:04,020:02,720:09=0924", "ein Käse,\n\n 3 €\t"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("\n")) == 1
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "704+220="}], tokenize=False)
    assert chat == tokenizer.bos_token + "704+220="


def test_a_seed_gives_the_same_weights_twice_and_another_seed_others():
    first, second = (prepare.pretrain(SHORT)[0].state_dict() for _ in range(2))
    other = prepare.pretrain(replace(SHORT, seed=2))[0].state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_data_have_verls_schema_and_no_problem_is_in_both_files(tmp_path):
    prepare.write_data(tmp_path, SHORT)
    splits = {
        split: pyarrow.parquet.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "val")
    }
    for split, rows in splits.items():
        assert len(rows) == SHORT.problems
        for index, row in enumerate(rows):
            (message,) = row["prompt"]
            a, b = message["content"].rstrip("=").split("+")
            assert row["reward_model"] == {"style": "rule", "ground_truth": f"{int(a) + int(b):04d}"}
            assert row["extra_info"] == {"split": split, "index": index} and row["data_source"] == "arithmetic"
    prompts = [{row["prompt"][0]["content"] for row in rows} for rows in splits.values()]
    assert not prompts[0] & prompts[1]


def test_a_useless_model_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(prepare.PreparationError, match=r"sampled accuracy 0.00 .* within 0.20 and 0.80"):
        prepare.prepare(tmp_path / "made", SHORT)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(prepare.PreparationError, match="is not empty"):
        prepare.prepare(tmp_path, SHORT)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_finished_folder_is_reused_and_one_of_other_settings_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "ACCURACY_BAND", (0.0, 1.0))  # three steps teach nothing
    made = prepare.prepare(tmp_path / "made", SHORT)
    stamp = tmp_path / "made" / "prepared.json"
    written = stamp.stat().st_mtime_ns
    assert prepare.prepare(tmp_path / "made", SHORT) == made and stamp.stat().st_mtime_ns == written
    again = prepare.prepare(tmp_path / "made", replace(SHORT, seed=2))
    assert again["key"] != made["key"] and json.loads(stamp.read_text()) == again


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_preparation_leaves_nothing(tmp_path, end):
    command = [sys.executable, "-m", "recipes.arithmetic.prepare", "--out", tmp_path / "made", "--seed", "1"]
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.iterdir()):  # until it has begun
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(end)
    assert process.wait(timeout=60) != 0
    assert list(tmp_path.iterdir()) == []
