"""PPO's command: the files of a run, its resumption, and the committed results on CartPole."""

import json
import re
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from amp_commands import DTYPES, SMALL, records, refusal, run, small_ppo, words
from amp_trainer_cases import edited, same_bits, snapshot
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.amp.checkpoint import read_checkpoint
from recipes.amp.ppo import __main__ as ppo
from recipes.amp.ppo import algorithm
from recipes.amp.ppo.__main__ import resume, save_checkpoint
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_resume_restores_all_but_the_environments(dtype, tmp_path):
    one, other = (small_ppo(dtype, total_steps=192) for _ in range(2))
    first = one.observations
    for _ in range(3):
        one.iterate()
    save_checkpoint(one, tmp_path / "checkpoint.pt")
    (tmp_path / "metrics.jsonl").write_text("1\n2\n3\n4\n")
    resume(other, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "1\n2\n3\n"
    assert same_bits(snapshot(one.trainer), snapshot(other.trainer))
    assert torch.equal(one.generator.get_state(), other.generator.get_state())
    assert (one.updates, one.episodes, list(one.returns)) == (other.updates, other.episodes, list(other.returns))
    assert not torch.equal(other.observations, first), "the first states again"
    assert other.iterate()["update"] == 4


def test_interrupted_run_resumes_from_its_checkpoint(tmp_path, monkeypatch, capsys):
    """From the first update's: the second is repeated, and the record that was being written is discarded."""
    iterate, now = algorithm.PPO.iterate, time.time

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
    assert "resuming after step 32; the environments are reset" in capsys.readouterr().out
    after = records(tmp_path)
    assert after[0] == before[0] and [record["update"] for record in after] == [1, 2, 3, 4]
    steps = [event.step for event in EventAccumulator(str(tmp_path)).Reload().Scalars("approx_kl")]
    assert steps == [32, 64, 96, 128]


@pytest.mark.parametrize(
    "change, given, message",
    [
        (lambda path: None, ["--env=Hand-v0"], "checkpoint.pt: made with env=CartPole-v1, not Hand-v0"),
        (lambda path: path.write_bytes(path.read_bytes()[:2000]), [], "truncated, or not a checkpoint"),
        (edited(lambda saved: saved.update(extra={})), [], "not a checkpoint of PPO"),
        (edited(lambda saved: saved["extra"]["fixed"].update(device="cuda")), [], "made with device=cuda, not cpu"),
        (lambda path: path.unlink(), [], "No such file or directory"),
        (lambda path: path.with_name("metrics.jsonl").unlink(), [], "No such file or directory"),
    ],
)
def test_files_that_do_not_fit_are_refused_and_kept(change, given, message, out, tmp_path):
    for name in ("checkpoint.pt", "metrics.jsonl", "evaluation.json"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    change(tmp_path / "checkpoint.pt")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert message in refusal(ppo, *IN_FLOAT16, f"--out={tmp_path}", "--resume", *given)
    assert before == {file: file.read_bytes() for file in tmp_path.iterdir()}


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
        varied = key in ("env", "use_amp", "dtype", "device", "compile", "seed", "resume")
        assert value == "" or varied or f"{key} {value}" in REPORT.read_text(), "results are of the default settings"


@pytest.mark.slow
@pytest.mark.parametrize("dtype, seed", [row[:2] for row in table_rows()])
def test_default_settings_solve_cartpole(dtype, seed, tmp_path):
    amp = [] if dtype == "float32" else ["--use-amp", f"--dtype={dtype}"]
    run(ppo, "--device=cpu", f"--seed={seed}", *amp, f"--out={tmp_path}")
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["mean"] >= SOLVED_RETURN and result["precision"]["effective_dtype"] == dtype
