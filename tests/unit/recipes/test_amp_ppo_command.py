"""PPO's command: the files of a run, and its resumption."""

import json
import math
import time
from pathlib import Path

import gymnasium
import pytest
import torch
from amp_commands import records, refusal, run, words
from amp_ppo_cases import DTYPES, SMALL, small_ppo, weights
from amp_trainer_cases import edited, same_bits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lib.paths import REPO
from recipes.amp.checkpoint import read_checkpoint
from recipes.amp.ppo import __main__ as ppo
from recipes.amp.ppo import algorithm
from recipes.amp.ppo.checkpoint import resume, save_checkpoint
from recipes.amp.ppo.telemetry import append_record

WORDS = words(**SMALL, eval_episodes=2)
IN_FLOAT16 = [*WORDS, "--use-amp", "--seed=3"]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """Return the folder of a small run in float16."""
    out = tmp_path_factory.mktemp("ppo") / "run"
    run(ppo, *IN_FLOAT16, f"--out={out}")
    return out


# --- telemetry


def test_tensorboard_has_the_records_of_metrics_jsonl(out):
    recorded, board = records(out), EventAccumulator(str(out)).Reload()
    assert [record["update"] for record in recorded] == [1, 2, 3]
    assert [record["steps"] for record in recorded] == [32, 64, 96]
    texts = {"amp_enabled": True, "amp_source": "command line", "effective_dtype": "float16", "fallback": None}
    texts["effective_dtype_share"] = {"float16": 1.0}
    numbers = {"overflow_steps", "overflow_rate", "loss_scale", "return_mean", "episodes", "approx_kl", "entropy"}
    numbers |= {"ratio_deviation", "steps_per_second", "policy_loss", "value_loss", "clip_fraction", "learning_rate"}
    for record in recorded:
        assert texts.items() <= record.items() and numbers <= record.keys()
    for name in (*numbers, "amp_enabled"):
        expected = {record["steps"]: float(record[name]) for record in recorded if record[name] is not None}
        shown = {event.step: event.value for event in board.Scalars(name)}
        assert shown == pytest.approx(expected, rel=1e-6), name
    assert [event.value for event in board.Scalars("effective_dtype_share/float16")] == [1.0] * 3
    for name in ("amp_source", "effective_dtype"):
        shown = [event.tensor_proto.string_val[0].decode() for event in board.Tensors(f"{name}/text_summary")]
        assert shown == [texts[name]] * 3
    assert (out / "curves.png").stat().st_size > 20_000


def test_nonfinite_number_is_recorded_as_null(tmp_path):
    with SummaryWriter(tmp_path) as board:
        append_record({"steps": 1, "loss": math.nan, "kl": math.inf, "good": 1.0}, tmp_path / "metrics.jsonl", board)
    assert records(tmp_path) == [{"steps": 1, "loss": None, "kl": None, "good": 1.0}]


def test_run_stops_at_the_requested_return(tmp_path, capsys):
    longer = words(env="Hand-v0", num_envs=16, num_steps=16, total_steps=25600, eval_episodes=0, device="cpu")
    run(ppo, *longer, "--stop-at=4", f"--out={tmp_path}")
    assert "the return has reached --stop-at 4" in capsys.readouterr().out
    last = records(tmp_path)[-1]
    assert last["return_mean"] >= 4 and last["episodes"] >= 100 and last["steps"] < 2560
    assert (tmp_path / "checkpoint.pt").exists()


def test_run_completes_without_an_episode_that_ends(tmp_path, monkeypatch):
    """Neither return nor time limit: there are curves, and the evaluation ends."""
    monkeypatch.setattr(algorithm, "EVALUATION_STEPS", 100)
    run(ppo, *WORDS, "--env=Endless-v0", f"--out={tmp_path}")
    assert {record["return_mean"] for record in records(tmp_path)} == {None}
    assert (tmp_path / "curves.png").exists()
    assert json.loads((tmp_path / "evaluation.json").read_text())["mean"] == 0.0


# --- checkpoints


def test_checkpoint_of_ppo_contains_provenance(out):
    extra = read_checkpoint(out / "checkpoint.pt")["extra"]
    assert extra["config"]["seed"] == 3 and extra["config"]["use_amp"] is True
    assert (extra["sources"]["use_amp"], extra["sources"]["gamma"]) == ("command line", "default")
    environment = {"id": "CartPole-v1", "max_episode_steps": 500, "actions": "Discrete(2)", "mode": "native"}
    assert environment.items() <= extra["env"].items()
    assert extra["precision"]["effective_dtype"] == "float16" and extra["precision"]["amp_enabled"] is True
    assert extra["versions"].keys() == {"torch", "gymnasium", "python"}
    assert extra["versions"]["gymnasium"] == gymnasium.__version__
    if (REPO / ".git").exists():
        assert len(extra["commit"]) == 40
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert evaluation["episodes"] == 2 and evaluation["config"] == extra["config"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_resume_restores_all_but_the_environments(dtype, tmp_path):
    one, other = (small_ppo(dtype, total_steps=192) for _ in range(2))
    first = one.state.observations
    for _ in range(3):
        one.iterate()
    save_checkpoint(one, tmp_path / "checkpoint.pt")
    resume(other, tmp_path / "checkpoint.pt")
    assert same_bits(weights(one), weights(other))
    assert same_bits(one.trainer.optimizer.state_dict(), other.trainer.optimizer.state_dict())
    assert torch.equal(one.generator.get_state(), other.generator.get_state())
    assert (one.updates, one.episodes, list(one.returns)) == (other.updates, other.episodes, list(other.returns))
    assert one.trainer.training_steps == other.trainer.training_steps == 12
    assert dtype != "float16" or one.trainer.scaler.state_dict() == other.trainer.scaler.state_dict()
    assert not torch.equal(other.state.observations, first), "the first states again"
    assert other.iterate()["update"] == 4


def test_interrupted_run_resumes_from_its_checkpoint(tmp_path, monkeypatch, capsys):
    """There is a checkpoint after the first update; the second, made after it, is repeated and recorded again.

    The resumed run is longer and in another dtype, and the record that was being written is discarded.
    """
    iterate, titles, now = algorithm.PPO.iterate, [], time.time
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda figure, title: titles.append(title))

    def interrupted(ppo: algorithm.PPO) -> dict:
        if ppo.updates == 2:
            raise KeyboardInterrupt
        return iterate(ppo)

    with monkeypatch.context() as patch:
        patch.setattr(algorithm.PPO, "iterate", interrupted)
        assert refusal(ppo, *WORDS, f"--out={tmp_path}").startswith("interrupted; the same command with --resume cont")
    before = records(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 3, "st')  # the run was killed here
    monkeypatch.setattr(time, "time", lambda: now() + 2)  # TensorBoard orders files by the second in their names
    changed = words(total_steps=128, dtype="bfloat16")
    run(ppo, *WORDS, f"--out={tmp_path}", "--resume", *changed, "--use-amp")
    assert "resuming after step 32 in bfloat16, previously in float32; the environments" in capsys.readouterr().out
    after = records(tmp_path)
    assert after[0] == before[0] and [record["update"] for record in after] == [1, 2, 3, 4]
    steps = [event.step for event in EventAccumulator(str(tmp_path)).Reload().Scalars("approx_kl")]
    assert steps == [32, 64, 96, 128]
    assert titles == ["CartPole-v1, float32 then bfloat16, seed 1"]


def test_finished_run_without_metrics_is_evaluated_again(out, tmp_path, capsys):
    (tmp_path / "checkpoint.pt").write_bytes((out / "checkpoint.pt").read_bytes())
    run(ppo, *IN_FLOAT16, f"--out={tmp_path}", "--resume")
    assert "resuming after step 96; the environments start anew" in capsys.readouterr().out
    assert json.loads((tmp_path / "evaluation.json").read_text())["steps"] == 96 and records(tmp_path) == []


@pytest.mark.parametrize(
    "change, given, message",
    [
        (lambda path: None, ["--hidden=8"], "made with hidden=16, not 8"),
        (lambda path: None, ["--env=Hand-v0"], "made with env=CartPole-v1, not Hand-v0"),
        (lambda path: path.write_bytes(path.read_bytes()[:2000]), [], "truncated, or not a checkpoint"),
        (edited(lambda saved: saved.update(extra={})), [], "not a checkpoint of PPO"),
        (edited(lambda saved: saved["extra"].pop("updates")), [], "not a checkpoint of PPO"),
        (edited(lambda saved: saved["extra"].update(device="cuda")), [], "made on cuda, not cpu"),
        (lambda path: path.unlink(), [], "there is no checkpoint"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused(change, given, message, out, tmp_path):
    for name in ("checkpoint.pt", "metrics.jsonl", "evaluation.json"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    change(tmp_path / "checkpoint.pt")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert message in refusal(ppo, *IN_FLOAT16, f"--out={tmp_path}", "--resume", *given)
    assert before == {file: file.read_bytes() for file in tmp_path.iterdir()}


@pytest.mark.parametrize("line", ["no json", "[1]", '{"steps": 3}'])
def test_malformed_metrics_are_refused_on_resume(line, out, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes((out / "checkpoint.pt").read_bytes())
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    refused = refusal(ppo, *IN_FLOAT16, f"--out={tmp_path}", "--resume")
    assert refused.startswith(f"{tmp_path}/metrics.jsonl: a line is not the record of an update")
    assert (tmp_path / "metrics.jsonl").read_text() == line + "\n"
