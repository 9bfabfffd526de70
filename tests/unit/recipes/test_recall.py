"""The recall task: its rules, the lift of its logits, and the noise that stands in for a mismatch."""

import asyncio
import random
import subprocess
import sys
from dataclasses import replace
from statistics import fmean, variance
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch

from recipes.arithmetic import families
from recipes.arithmetic import prepare as arithmetic
from recipes.recall import prepare
from recipes.recall.task import BLOCKS, FREE, PROMPTS, Recall, compute_score
from verl_precision.paths import REPO

SHORT = prepare.RecallSettings(steps=3, batch_size=2, length=32)


def test_demonstrations_recall_the_digits_and_are_free_elsewhere():
    rng = random.Random(0)
    for length in (32, 128, 512):
        task = Recall(length)
        for (name,) in task.problems(len(PROMPTS), rng):
            text = task.demonstration(name, rng)
            assert compute_score("", text, task.answer(name)) == 1.0
            assert len(text) + 1 == task.RESPONSE_LENGTH and len(task.prompt(name)) + 1 == task.PROMPT_LENGTH
            assert set(text[length // BLOCKS - 1 :: length // BLOCKS]) <= set("0123456789")
    texts = [Recall().demonstration("a", rng) for _ in range(200)]
    kinds = {character for text in texts for character in text[:7]}
    assert kinds == set(FREE) and len(FREE) == 64 and not set(FREE) & set('0123456789="\\')
    scores = [compute_score("", Recall().demonstration("a", rng, 0.05), Recall.answer("a")) for _ in range(1000)]
    assert 0.4 < fmean(scores) < 0.6  # (0.95 + 0.05 / 10) ** 16 = 0.48


@pytest.mark.parametrize("change", ["", "x", "wrong digit", "half"])
def test_other_answers_get_no_reward(change):
    right = Recall().demonstration("a", random.Random(0))
    wrong = {"": "", "x": right + "x", "wrong digit": right[:-1] + "x", "half": right[::2]}[change]
    assert compute_score("", wrong, Recall.answer("a")) == 0.0


@pytest.mark.parametrize("length", [0, 16, 100, 1024])
def test_length_that_does_not_fit_is_refused(length):
    with pytest.raises(ValueError, match=f"length={length}: must be a multiple of 16 from 32 to 1008"):
        Recall(length)


def test_every_prompt_is_in_both_files(tmp_path):
    arithmetic.write_data(tmp_path, SHORT)
    for split in ("train", "val"):
        rows = pyarrow.parquet.read_table(tmp_path / f"{split}.parquet").to_pylist()
        assert {row["prompt"][0]["content"] for row in rows} == {f"{name}=" for name in PROMPTS}
        for row in rows:
            assert row["reward_model"]["ground_truth"] == Recall.answer(row["prompt"][0]["content"][0])


def test_lift_raises_all_logits_and_changes_no_probability():
    tokenizer = families.build_tokenizer("qwen2")
    model = families.build_model("qwen2", tokenizer, seed=1)
    texts = [f"{tokenizer.bos_token}a={Recall(32).demonstration('a', random.Random(seed))}" for seed in (7, 8)]
    tokens = tokenizer(texts, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        before = model(tokens).logits.double()
        fit = prepare.lift_logits(model, tokenizer, SHORT, 100.0)
        after = model(tokens).logits.double()
    raised = (after - before)[:, Recall.PROMPT_LENGTH - 1 :]
    assert raised.std(-1).max() < 1e-3, "equally for every token of the vocabulary"
    assert raised.mean() == pytest.approx(100, rel=0.1)
    assert torch.allclose(before.log_softmax(-1), after.log_softmax(-1), atol=1e-3)
    assert 0.8 < fit["least"] < 1 < fit["most"] < 1.2 and fit["logits_min"] > 30


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lift_beyond_float16_is_refused_with_the_largest_that_fits(seed):
    tokenizer = families.build_tokenizer("qwen2")
    model = families.build_model("qwen2", tokenizer, seed=seed)
    with pytest.raises(prepare.PreparationError, match="logits would exceed 65504; the largest that fits is") as error:
        prepare.lift_logits(model, tokenizer, SHORT, 1e6)
    largest = float(str(error.value).rsplit(" ", 1)[1])
    with pytest.raises(prepare.PreparationError):
        prepare.lift_logits(model, tokenizer, SHORT, largest + 1)
    assert 65000 < prepare.lift_logits(model, tokenizer, SHORT, largest)["logits_max"] < 65504


def test_lifts_share_a_warm_start_and_other_folders_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(arithmetic, "ACCURACY_BAND", (0.0, 1.0))  # three steps are too few to learn
    one = prepare.prepare(tmp_path / "one", SHORT, 0.0)
    written = (tmp_path / "recall-warm-32/prepared.json").stat().st_mtime_ns
    two = prepare.prepare(tmp_path / "two", SHORT, 64.0)
    assert (tmp_path / "recall-warm-32/prepared.json").stat().st_mtime_ns == written
    assert two["logits"]["logits_min"] > one["logits"]["logits_max"]
    stamp = (tmp_path / "two/prepared.json").stat().st_mtime_ns
    assert prepare.prepare(tmp_path / "two", SHORT, 64.0) == two
    assert (tmp_path / "two/prepared.json").stat().st_mtime_ns == stamp, "reused"
    assert prepare.prepare(tmp_path / "two", SHORT, 0.0)["logits"] == one["logits"], "replaced"
    assert prepare.prepare(tmp_path / "two", replace(SHORT, seed=2), 0.0)["key"] != one["key"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("mine")
    with pytest.raises(prepare.PreparationError, match="is not empty"):
        prepare.prepare(tmp_path / "mine", SHORT, 0.0)
    with pytest.raises(prepare.PreparationError, match="is the folder of the warm start"):
        prepare.prepare(tmp_path / "recall-warm-32", SHORT, 0.0)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--length 100", "--length: length=100: must be a multiple of 16"),
        ("--length x", "--length: invalid int value: 'x'"),
        ("--lift -1", "--lift -1: must be a number of at least 0"),
        ("--lift nan", "--lift nan: must be a number of at least 0"),
        ("--lift abc", "--lift: invalid float value: 'abc'"),
    ],
)
def test_bad_dials_are_refused_before_the_warm_start(words, reason, tmp_path):
    command = [sys.executable, "-m", "recipes.recall.prepare", "--out", tmp_path / "made", *words.split()]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode and reason in done.stderr.splitlines()[-1] and not list(tmp_path.iterdir())


@pytest.mark.subprocess  # imports verl
def test_negative_noise_is_refused(monkeypatch):
    from recipes.recall import noise

    def init(self, config):
        self.config = config

    monkeypatch.setattr(noise.SingleTurnAgentLoop, "__init__", init)
    with pytest.raises(ValueError, match="rollouts.k3=-1: must not be negative"):
        noise.NoisyAgentLoop(SimpleNamespace(rollouts=SimpleNamespace(k3=-1)))


@pytest.mark.subprocess  # imports verl
def test_noise_has_the_requested_k3_and_leaves_weights_a_mean_of_one(monkeypatch):
    from recipes.recall import noise

    async def sampled(self, sampling_params, **kwargs):
        return SimpleNamespace(response_ids=list(range(20000)), response_logprobs=[-4.0] * 20000)

    monkeypatch.setattr(noise.SingleTurnAgentLoop, "run", sampled)
    loop = object.__new__(noise.NoisyAgentLoop)
    loop.config = SimpleNamespace(rollouts=SimpleNamespace(k3=0.06), data=SimpleNamespace(seed=1))
    log_probs = [asyncio.run(loop.run({}, global_steps=step)).response_logprobs for step in (1, 1, 2)]
    assert log_probs[0] == log_probs[1] != log_probs[2], "determined by seed, step and answer"
    ratio = -4.0 - torch.tensor(log_probs[0], dtype=torch.float64)  # trainer minus rollout
    assert (ratio.exp() - ratio - 1).mean().item() == pytest.approx(0.06, rel=0.05)
    assert ratio.exp().mean().item() == pytest.approx(1, abs=0.01)
    assert variance(ratio.tolist()) == pytest.approx(0.12, rel=0.05)
