"""PPO's command: the files of a run, and the committed results on CartPole."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from amp_commands import DTYPES, SMALL, records, run, words
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.amp.checkpoint import read_checkpoint
from recipes.amp.ppo import __main__ as ppo
from recipes.amp.ppo import algorithm
from recipes.amp.ppo.algorithm import PPOConfig
from verl_precision.paths import REPO

REPORT = REPO / "docs/results/amp-ppo.md"
SOLVED_RETURN = 475.0  # Gymnasium's threshold
WORDS = words(**SMALL, eval_episodes=2)
IN_FLOAT16 = [*WORDS, "--use-amp", "--seed=3"]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Return the folder of a small run in float16."""
    out = tmp_path_factory.mktemp("ppo") / "run"
    run(ppo, *IN_FLOAT16, f"--out={out}")
    return out


def test_tensorboard_has_the_records_of_metrics_jsonl(out):
    recorded, board = records(out), EventAccumulator(str(out)).Reload()
    assert [record["update"] for record in recorded] == [1, 2, 3]
    assert [record["steps"] for record in recorded] == [32, 64, 96]
    texts = {"amp_source": "command line", "effective_dtype": "float16"}
    for record in recorded:
        assert texts.items() <= record.items() and record["amp_enabled"] is True
    for name in ("amp_enabled", "overflow_steps", "loss_scale", "ratio_deviation", "return_mean", "policy_loss"):
        expected = {record["steps"]: float(record[name]) for record in recorded if record[name] is not None}
        shown = {event.step: event.value for event in board.Scalars(name)}
        assert shown == pytest.approx(expected, rel=1e-6), name
    for name, text in texts.items():
        shown = [event.tensor_proto.string_val[0].decode() for event in board.Tensors(f"{name}/text_summary")]
        assert shown == [text] * 3


def test_run_completes_without_an_episode_that_ends(tmp_path, monkeypatch):
    """Neither return nor time limit: there are records, and the evaluation ends."""
    monkeypatch.setattr(algorithm, "EVALUATION_STEPS", 100)
    run(ppo, *WORDS, "--env=Endless-v0", f"--out={tmp_path}")
    assert {record["return_mean"] for record in records(tmp_path)} == {None}
    assert json.loads((tmp_path / "evaluation.json").read_text())["mean"] == 0.0


def test_checkpoint_of_ppo_contains_its_settings(out):
    extra = read_checkpoint(out / "checkpoint.pt")["extra"]
    assert extra["config"]["seed"] == 3 and extra["config"]["use_amp"] is True
    assert (extra["sources"]["use_amp"], extra["sources"]["gamma"]) == ("command line", "default")
    assert extra["precision"]["effective_dtype"] == "float16"
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert evaluation["episodes"] == 2 and evaluation["config"] == extra["config"]


def table_rows() -> list[list[str]]:
    """Return the rows of the committed table: dtype, seed, step of 475, return, skips, loss scale, ratio."""
    rows = re.findall(r"^\| ((?:float|bfloat)[^\n]*) \|$", REPORT.read_text(), re.MULTILINE)
    return [row.split(" | ") for row in rows]


def test_committed_results_solve_cartpole_in_every_dtype():
    """In each dtype three seeds end above 475, and the mean of 16 bits is at least 0.9 of fp32's."""
    returns = {dtype: [] for dtype in DTYPES}
    for dtype, _, solved_at, evaluation, *_ in table_rows():
        assert int(solved_at) <= PPOConfig().total_steps and float(evaluation) >= SOLVED_RETURN
        returns[dtype].append(float(evaluation))
    assert all(len(each) == 3 for each in returns.values())
    assert min(sum(returns["float16"]), sum(returns["bfloat16"])) >= 0.9 * sum(returns["float32"])
    for key, value in asdict(PPOConfig()).items():
        varied = key in ("env", "use_amp", "dtype", "device", "compile", "seed")
        assert value == "" or varied or f"{key} {value}" in REPORT.read_text(), "results are of the default settings"


@pytest.mark.slow
@pytest.mark.parametrize("dtype, seed", [row[:2] for row in table_rows()])
def test_default_settings_solve_cartpole(dtype, seed, tmp_path):
    amp = [] if dtype == "float32" else ["--use-amp", f"--dtype={dtype}"]
    run(ppo, "--device=cpu", f"--seed={seed}", *amp, f"--out={tmp_path}")
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["mean"] >= SOLVED_RETURN and result["precision"]["effective_dtype"] == dtype
