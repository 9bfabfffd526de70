"""PPO's commands: the files of a run, its resumption, and the CartPole experiment with its committed results."""

import json
import shutil
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
from recipes.amp.ppo import algorithm, experiment
from recipes.amp.ppo import experiment_results as results
from recipes.amp.ppo.checkpoint import resume, save_checkpoint
from recipes.amp.ppo.config import PPOConfig
from recipes.amp.ppo.provenance import provenance
from verl_precision.paths import REPO

FOLDER = REPO / "docs" / "results"
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
        seconds = record["rollout_seconds"] + record["update_seconds"]
        assert record["steps_per_second"] == pytest.approx(32 / seconds)
    for name in ("amp_enabled", "overflow_steps", "loss_scale", "ratio_deviation", "return_mean", "policy_loss"):
        expected = {record["steps"]: float(record[name]) for record in recorded if record[name] is not None}
        shown = {event.step: event.value for event in board.Scalars(name)}
        assert shown == pytest.approx(expected, rel=1e-6), name
    assert [event.value for event in board.Scalars("effective_dtype_share/float16")] == [1.0] * 3
    for name, text in texts.items():
        shown = [event.tensor_proto.string_val[0].decode() for event in board.Tensors(f"{name}/text_summary")]
        assert shown == [text] * 3
    assert (out / "curves.png").stat().st_size > 20_000


def test_run_stops_at_the_requested_return(tmp_path, capsys):
    longer = words(env="Hand-v0", num_envs=16, num_steps=16, total_steps=25600, eval_episodes=0, device="cpu")
    run(ppo, *longer, "--stop-at=4", f"--out={tmp_path}")
    assert "the return has reached --stop-at 4" in capsys.readouterr().out
    last = records(tmp_path)[-1]
    assert last["return_mean"] >= 4 and last["episodes"] >= 100 and last["steps"] < 2560
    assert read_checkpoint(tmp_path / "checkpoint.pt")["extra"]["updates"] == last["update"]


def test_run_completes_without_an_episode_that_ends(tmp_path, monkeypatch):
    """Neither return nor time limit: there are curves, and the evaluation ends."""
    monkeypatch.setattr(algorithm, "EVALUATION_STEPS", 100)
    run(ppo, *WORDS, "--env=Endless-v0", f"--out={tmp_path}")
    assert {record["return_mean"] for record in records(tmp_path)} == {None}
    assert (tmp_path / "curves.png").exists()
    assert json.loads((tmp_path / "evaluation.json").read_text())["mean"] == 0.0


def test_checkpoint_of_ppo_contains_provenance(out):
    extra = read_checkpoint(out / "checkpoint.pt")["extra"]
    assert extra["config"]["seed"] == 3 and extra["config"]["use_amp"] is True
    assert (extra["sources"]["use_amp"], extra["sources"]["gamma"]) == ("command line", "default")
    environment = {"id": "CartPole-v1", "max_episode_steps": 500, "actions": "Discrete(2)", "mode": "native"}
    assert environment.items() <= extra["env"].items() and extra["precision"]["effective_dtype"] == "float16"
    assert extra["versions"].keys() == {"torch", "gymnasium", "python"}
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
    assert same_bits(snapshot(one.trainer), snapshot(other.trainer))
    assert torch.equal(one.generator.get_state(), other.generator.get_state())
    assert (one.updates, one.episodes, list(one.returns)) == (other.updates, other.episodes, list(other.returns))
    assert not torch.equal(other.state.observations, first), "the first states again"
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
    assert "resuming after step 32 in bfloat16, previously in float32; the environments" in capsys.readouterr().out
    after = records(tmp_path)
    assert after[0] == before[0] and [record["update"] for record in after] == [1, 2, 3, 4]
    steps = [event.step for event in EventAccumulator(str(tmp_path)).Reload().Scalars("approx_kl")]
    assert steps == [32, 64, 96, 128]


def test_finished_run_without_metrics_is_evaluated_again(out, tmp_path, capsys):
    (tmp_path / "checkpoint.pt").write_bytes((out / "checkpoint.pt").read_bytes())
    run(ppo, *IN_FLOAT16, f"--out={tmp_path}", "--resume")
    assert "resuming after step 96; the environments start anew" in capsys.readouterr().out
    assert json.loads((tmp_path / "evaluation.json").read_text())["steps"] == 96 and records(tmp_path) == []


@pytest.mark.parametrize(
    "change, given, message",
    [
        (lambda path: None, ["--env=Hand-v0"], "checkpoint.pt: made with env=CartPole-v1, not Hand-v0"),
        (lambda path: path.write_bytes(path.read_bytes()[:2000]), [], "truncated, or not a checkpoint"),
        (edited(lambda saved: saved.update(extra={})), [], "not a checkpoint of PPO"),
        (edited(lambda saved: saved["extra"].pop("updates")), [], "not a checkpoint of PPO"),
        (edited(lambda saved: saved["extra"].update(device="cuda")), [], "made on cuda, not cpu"),
        (lambda path: path.unlink(), [], "there is no checkpoint"),
        (lambda path: path.with_name("metrics.jsonl").write_text('{"steps": 3}\n'), [], "not the record of an update"),
    ],
)
def test_files_that_do_not_fit_are_refused_and_kept(change, given, message, out, tmp_path):
    for name in ("checkpoint.pt", "metrics.jsonl", "evaluation.json"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    change(tmp_path / "checkpoint.pt")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert message in refusal(ppo, *IN_FLOAT16, f"--out={tmp_path}", "--resume", *given)
    assert before == {file: file.read_bytes() for file in tmp_path.iterdir()}


def test_committed_results_solve_cartpole_in_every_dtype():
    """In each dtype three seeds end above 475, and the mean of 16 bits is at least 0.9 of fp32's."""
    runs, report = results.read_runs(FOLDER), (FOLDER / "amp-ppo.md").read_text()
    assert runs.keys() == {(dtype, str(seed)) for dtype in results.DTYPES for seed in results.SEEDS}
    for (dtype, _), rows in runs.items():
        assert {row["effective_dtype"] for row in rows} == {dtype}
        assert float(rows[-1]["evaluation"]) >= results.SOLVED_RETURN and results.solved_at(rows) is not None
    means = results.mean_evaluation(runs)
    assert min(means["float16"], means["bfloat16"]) >= 0.9 * means["float32"]
    for key, value in asdict(PPOConfig()).items():
        varied = key in ("env", "use_amp", "dtype", "device", "seed", "resume")
        assert value is None or varied or f"{key} {value}" in report, "the results are of the default settings"


def test_recorded_run_replaces_its_older_rows(tmp_path, monkeypatch):
    """Run after run in another order: the committed table, and the report but for settings and versions."""
    runs, evaluation = results.read_runs(FOLDER), provenance(small_ppo())
    with monkeypatch.context() as patch:  # one figure takes as long as all tables
        patch.setattr(results, "plot_returns", lambda runs, path: None)
        for rows in reversed(runs.values()):
            table, report, figure = results.record_run(tmp_path, rows, evaluation)
    assert table.read_bytes() == (FOLDER / "amp-ppo.csv").read_bytes()
    written, committed = (file.read_text().partition("Settings:")[0] for file in (report, FOLDER / "amp-ppo.md"))
    assert written == committed
    worse = [{**row, "evaluation": row["evaluation"] and "100.0"} for row in runs["float16", "2"]]
    results.record_run(tmp_path, worse, evaluation)
    assert "| float16 | 2 | 98304 | 100.0 | " in report.read_text() and len(results.read_runs(tmp_path)) == len(runs)
    assert figure.stat().st_size > 20_000


def test_run_in_another_dtype_is_not_recorded(monkeypatch, tmp_path):
    """The switch turns AMP off: the run's rows would be fp32's under float16's name."""
    shutil.copy(FOLDER / "amp-ppo.csv", tmp_path)
    monkeypatch.setenv("DISABLE_AMP", "1")
    small = {key: SMALL[key] for key in ("num_envs", "num_steps", "total_steps", "minibatches")} | {"eval_episodes": 1}
    monkeypatch.setattr(experiment, "PPOConfig", lambda **settings: PPOConfig(**{**settings, **small}))
    refused = refusal(experiment, "--dtypes=float16", "--seeds=1", f"--out={tmp_path}")
    assert refused.startswith("dtypes=float16: the run computed in float32 ") and "; unset DISABLE_AMP" in refused
    assert (tmp_path / "amp-ppo.csv").read_bytes() == (FOLDER / "amp-ppo.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", results.SEEDS)
@pytest.mark.parametrize("dtype", results.DTYPES)
def test_default_settings_solve_cartpole(dtype, seed, tmp_path):
    rows, evaluation = experiment.run_cartpole(dtype, seed, tmp_path / "run")
    assert evaluation["mean"] >= results.SOLVED_RETURN and rows[-1]["effective_dtype"] == dtype
