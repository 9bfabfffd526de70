"""PPO's command: the files of a run, its resumption, and refusals in one line."""

import json
import math
import time
from pathlib import Path

import gymnasium
import pytest
import torch
from amp_ppo_cases import DTYPES, WORDS, config, records, weights
from amp_trainer_cases import same_bits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lib.paths import REPO
from recipes.amp.checkpoint import read_checkpoint
from recipes.amp.ppo.__main__ import main
from recipes.amp.ppo.algorithm import PPO
from recipes.amp.ppo.checkpoint import resume, save_checkpoint
from recipes.amp.ppo.telemetry import append_record


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return the folder of a small run in float16."""
    out = tmp_path_factory.mktemp("ppo") / "run"
    main([*WORDS, "--use-amp", "--seed=3", f"--out={out}"])
    return out


# --- telemetry


def test_tensorboard_has_the_records_of_metrics_jsonl(run):
    recorded, board = records(run), EventAccumulator(str(run)).Reload()
    assert [record["update"] for record in recorded] == [1, 2, 3]
    assert [record["steps"] for record in recorded] == [32, 64, 96]
    words = {"amp_enabled": True, "amp_source": "command line", "effective_dtype": "float16", "fallback": None}
    words["effective_dtype_share"] = {"float16": 1.0}
    numbers = {"overflow_steps", "overflow_rate", "loss_scale", "return_mean", "episodes", "approx_kl", "entropy"}
    numbers |= {"ratio_deviation", "steps_per_second", "policy_loss", "value_loss", "clip_fraction", "learning_rate"}
    for record in recorded:
        assert words.items() <= record.items() and numbers <= record.keys()
    for name in (*numbers, "amp_enabled"):
        expected = {record["steps"]: float(record[name]) for record in recorded if record[name] is not None}
        shown = {event.step: event.value for event in board.Scalars(name)}
        assert shown == pytest.approx(expected, rel=1e-6), name
    assert [event.value for event in board.Scalars("effective_dtype_share/float16")] == [1.0] * 3
    for name in ("amp_source", "effective_dtype"):
        texts = [event.tensor_proto.string_val[0].decode() for event in board.Tensors(f"{name}/text_summary")]
        assert texts == [words[name]] * 3
    assert (run / "curves.png").stat().st_size > 20_000


def test_nonfinite_number_is_recorded_as_null(tmp_path):
    board = SummaryWriter(tmp_path)
    append_record({"steps": 1, "loss": math.nan, "kl": math.inf, "good": 1.0}, tmp_path / "m.jsonl", board)
    board.close()
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"steps": 1, "loss": None, "kl": None, "good": 1.0}


def test_run_stops_at_the_requested_return(tmp_path, capsys):
    words = ["--env=Hand-v0", "--num-envs=16", "--num-steps=16", "--total-steps=25600", "--eval-episodes=0"]
    main([*words, "--device=cpu", "--stop-at=4", f"--out={tmp_path / 'run'}"])
    assert "the return has reached --stop-at 4" in capsys.readouterr().out
    last = records(tmp_path / "run")[-1]
    assert last["return_mean"] >= 4 and last["episodes"] >= 100 and last["steps"] < 2560
    assert (tmp_path / "run/checkpoint.pt").exists()


def test_run_completes_without_an_episode_that_ends(tmp_path):
    """Neither return nor time limit: there are curves, and the evaluation ends."""
    main([*WORDS, "--env=Endless-v0", f"--out={tmp_path / 'run'}"])
    assert {record["return_mean"] for record in records(tmp_path / "run")} == {None}
    assert (tmp_path / "run/curves.png").exists()
    assert json.loads((tmp_path / "run/evaluation.json").read_text())["mean"] == 0.0


# --- checkpoints


def test_checkpoint_of_ppo_contains_provenance(run):
    extra = read_checkpoint(run / "checkpoint.pt")["extra"]
    assert extra["config"]["seed"] == 3 and extra["config"]["use_amp"] is True
    assert (extra["sources"]["use_amp"], extra["sources"]["gamma"]) == ("command line", "default")
    assert extra["env"]["id"] == "CartPole-v1" and extra["env"]["max_episode_steps"] == 500
    assert extra["env"]["actions"] == "Discrete(2)" and extra["env"]["mode"] == "native"
    assert extra["precision"]["effective_dtype"] == "float16" and extra["precision"]["amp_enabled"] is True
    assert extra["versions"].keys() == {"torch", "gymnasium", "python"}
    assert extra["versions"]["gymnasium"] == gymnasium.__version__
    if (REPO / ".git").exists():
        assert len(extra["commit"]) == 40
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["episodes"] == 2 and evaluation["config"] == extra["config"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_resume_restores_all_but_the_environments(dtype, tmp_path):
    made = PPO(config(dtype, total_steps=192))
    for _ in range(3):
        made.iterate()
    save_checkpoint(made, tmp_path / "checkpoint.pt")
    taken = PPO(config(dtype, total_steps=192))
    resume(taken, tmp_path / "checkpoint.pt")
    for one, other in ((made, taken),):
        assert same_bits(weights(one), weights(other))
        assert same_bits(one.trainer.optimizer.state_dict(), other.trainer.optimizer.state_dict())
        assert torch.equal(one.generator.get_state(), other.generator.get_state())
        assert (one.updates, one.episodes, list(one.returns)) == (other.updates, other.episodes, list(other.returns))
        assert one.trainer.training_steps == other.trainer.training_steps == 12
        if dtype == "float16":
            assert one.trainer.scaler.state_dict() == other.trainer.scaler.state_dict()
    assert not torch.equal(taken.state.observations, PPO(config(dtype)).state.observations), "the first states again"
    assert taken.iterate()["update"] == 4


def test_resume_reports_a_change_of_dtype(tmp_path, capsys, monkeypatch):
    out, titles = tmp_path / "run", []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda figure, title: titles.append(title))
    main([*WORDS, f"--out={out}"])
    main([*WORDS, f"--out={out}", "--resume", "--total-steps=128", "--use-amp", "--dtype=bfloat16"])
    assert "resuming after step 96 in bfloat16, previously in float32; the environments" in capsys.readouterr().out
    assert titles == ["CartPole-v1, float32, seed 1", "CartPole-v1, float32 then bfloat16, seed 1"]


def test_resume_continues_with_the_same_command(tmp_path, capsys):
    out = tmp_path / "run"
    main([*WORDS, f"--out={out}"])
    before = records(out)
    with (out / "metrics.jsonl").open("a") as file:  # of an update after the last checkpoint
        file.write(json.dumps({**before[-1], "update": 4, "steps": 128}) + "\n")
        file.write('{"update": 5, "st')  # the run was killed here
    capsys.readouterr()
    main([*WORDS, f"--out={out}", "--resume", "--total-steps=192"])
    assert "resuming after step 96; the environments start anew" in capsys.readouterr().out
    after = records(out)
    assert after[:3] == before and [record["update"] for record in after] == [1, 2, 3, 4, 5, 6]
    board = EventAccumulator(str(out)).Reload()
    assert [event.step for event in board.Scalars("approx_kl")] == [32, 64, 96, 128, 160, 192]


def test_finished_run_without_metrics_is_evaluated_again(run, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes((run / "checkpoint.pt").read_bytes())
    main([*WORDS, "--seed=3", "--use-amp", f"--out={tmp_path}", "--resume"])
    assert json.loads((tmp_path / "evaluation.json").read_text())["steps"] == 96 and records(tmp_path) == []


def test_float16_resumes_without_a_loss_scale_with_a_warning(run, tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes((run / "checkpoint.pt").read_bytes())
    edit(path, lambda saved: saved.update(grad_scaler=None))
    ppo = PPO(config("float16", seed=3, out=str(tmp_path)))
    with pytest.warns(UserWarning, match="holds no loss scale"):
        resume(ppo, path)
    assert ppo.updates == 3


def test_interrupted_run_resumes_from_its_checkpoint(tmp_path, monkeypatch):
    """There is a checkpoint after the first update; the second, made after it, is repeated and recorded again."""
    out, iterate = tmp_path / "run", PPO.iterate

    def interrupted(ppo: PPO) -> dict:
        if ppo.updates == 2:
            raise KeyboardInterrupt
        return iterate(ppo)

    monkeypatch.setattr(PPO, "iterate", interrupted)
    with pytest.raises(SystemExit, match="interrupted; the same command with --resume continues"):
        main([*WORDS, f"--out={out}"])
    monkeypatch.undo()
    first = int(time.time())
    while int(time.time()) == first:  # TensorBoard orders files of events by the second in their names
        time.sleep(0.05)
    main([*WORDS, f"--out={out}", "--resume"])
    assert [record["update"] for record in records(out)] == [1, 2, 3]
    steps = [event.step for event in EventAccumulator(str(out)).Reload().Scalars("approx_kl")]
    assert steps == [32, 64, 96]


def edit(path: Path, change) -> None:
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)


@pytest.mark.parametrize(
    "change, words, message",
    [
        (lambda path: None, ["--hidden=8"], "made with hidden=16, not 8"),
        (lambda path: None, ["--env=Hand-v0"], "made with env=CartPole-v1, not Hand-v0"),
        (lambda path: path.write_bytes(path.read_bytes()[:2000]), [], "truncated, or not a checkpoint"),
        (lambda path: edit(path, lambda saved: saved.update(version=99)), [], "version 99, but this trainer reads up"),
        (lambda path: edit(path, lambda saved: saved.update(extra={})), [], "not a checkpoint of PPO"),
        (lambda path: edit(path, lambda saved: saved["extra"].pop("updates")), [], "not a checkpoint of PPO"),
        (
            lambda path: edit(path, lambda saved: saved["extra"].update(device="cuda")),
            [],
            "made on cuda, not cpu; resume with --device cuda",
        ),
        (lambda path: edit(path, lambda saved: saved["model"].popitem()), [], "of another model"),
        (lambda path: path.unlink(), [], "there is no checkpoint"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused(change, words, message, run, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    for file in run.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    change(out / "checkpoint.pt")
    before = {file: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(SystemExit) as refused:
        main([*WORDS, "--seed=3", "--use-amp", f"--out={out}", "--resume", *words])
    assert message in str(refused.value.code) and "\n" not in str(refused.value.code)
    assert before == {file: file.read_bytes() for file in out.iterdir()}


@pytest.mark.parametrize("line", ["no json", "[1]", '{"steps": 3}'])
def test_malformed_metrics_are_refused_on_resume(line, run, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes((run / "checkpoint.pt").read_bytes())
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(SystemExit, match="metrics.jsonl: a line is not the record of an update"):
        main([*WORDS, "--seed=3", "--use-amp", f"--out={tmp_path}", "--resume"])
    assert (tmp_path / "metrics.jsonl").read_text() == line + "\n"


# --- refusals: one line, exit code 1, nothing on disk


@pytest.mark.parametrize(
    "words, message",
    [
        (["--env=CartPle-v1"], "env=CartPle-v1 is unknown to Gymnasium; did you mean CartPole-v1"),
        (["--env=nowhere:X-v0"], "env=nowhere:X-v0 cannot be created: No module named 'nowhere'"),
        (["--env=Pendulum-v1"], "env=Pendulum-v1: actions are Box(-2.0, 2.0, (1,), float32), but must be Discrete or"),
        (
            ["--env=Keyed-v0"],
            "env=Keyed-v0: observations are Dict('x': Box(0.0, 1.0, (1,), float32)), but must be Box",
        ),
        (["--env=Hand-v0", "--vectorize=native"], "vectorize=native must be auto, sync or async with env=Hand-v0"),
        (["--vectorize=threads"], "vectorize=threads must be auto, native, sync or async"),
        (["--dtype=float32"], "dtype=float32 must be float16 or bfloat16"),
        (["--dtype=int8", "--use-amp"], "dtype=int8 must be float16 or bfloat16"),
        (["--device=tpu"], "device=tpu must be auto, cpu or cuda"),
        (["--minibatches=5"], "minibatches=5 must be a divisor of num_envs * num_steps = 32 into parts of"),
        (["--minibatches=16"], "minibatches=16 must be a divisor of num_envs * num_steps = 32 into parts of"),
        (["--minibatches=0"], "minibatches=0 must be at least 1"),
        (["--num-steps=1"], "num_steps=1 must be at least 2"),
        (["--num-envs=0"], "num_envs=0 must be at least 1"),
        (["--total-steps=31"], "total_steps=31 must be at least num_envs * num_steps = 32"),
        (["--gamma=1.1"], "gamma=1.1 must be between 0 and 1"),
        (["--gae-lambda=-0.1"], "gae_lambda=-0.1 must be between 0 and 1"),
        (["--clip=0"], "clip=0.0 must be between 0 and 1"),
        (["--learning-rate=nan"], "learning_rate=nan must be positive"),
        (["--learning-rate=fast"], "argument --learning-rate: invalid float value: 'fast'"),
        (["--max-grad-norm=0"], "max_grad_norm=0.0 must be "),
        (["--loss-scale=0"], "loss_scale=0.0 must be positive"),
        (["--seed=-1"], "seed=-1 must be at least 0"),
        (["--stop-at=nan"], "stop_at=nan must be a finite number"),
        (["--steps=3"], "--steps=3 is not an option; did you mean "),
        (["--resume"], "checkpoint.pt: there is no checkpoint to resume from"),
    ],
)
def test_invalid_setting_is_refused_and_nothing_is_written(words, message, tmp_path):
    with pytest.raises(SystemExit) as refused:
        main([*WORDS, f"--out={tmp_path / 'run'}", *words])
    assert message in str(refused.value.code) and "\n" not in str(refused.value.code)
    assert not (tmp_path / "run").exists()


def test_malformed_kill_switch_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DISABLE_AMP", "yes")
    with pytest.raises(
        SystemExit, match="^recipes.amp.ppo: DISABLE_AMP='yes' in the environment must be 1, 0, true or false"
    ):
        main([*WORDS, f"--out={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_cuda_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="device=cuda must be auto or cpu"):
        main([*WORDS, f"--out={tmp_path / 'run'}", "--device=cuda"])


def test_missing_out_is_refused():
    with pytest.raises(SystemExit, match="--out is missing"):
        main([])


@pytest.mark.parametrize("result", ["metrics.jsonl", "checkpoint.pt"])
def test_folder_with_results_is_refused(result, run, tmp_path):
    (tmp_path / result).write_bytes((run / result).read_bytes())
    with pytest.raises(SystemExit, match="must be a folder without results"):
        main([*WORDS, f"--out={tmp_path}"])
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [(run / result).read_bytes()]


def test_nan_observation_ends_the_command_in_one_line(tmp_path):
    with pytest.raises(SystemExit) as refused:
        main([*WORDS, "--env=Nan-v0", f"--out={tmp_path / 'run'}"])
    message = str(refused.value.code)
    assert message.startswith("recipes.amp.ppo: env=Nan-v0: observation[0] of environment ") and "\n" not in message


def test_consecutive_overflows_end_the_command_in_one_line(tmp_path):
    words = ["--use-amp", "--loss-scale=3e38", "--total-steps=320", f"--out={tmp_path / 'run'}"]
    with pytest.raises(SystemExit) as refused:
        main([*WORDS, *words])
    message = str(refused.value.code)
    assert message.startswith("recipes.amp.ppo: 32 optimizer steps in a row overflowed") and "\n" not in message
    assert records(tmp_path / "run")[-1]["overflow_rate"] == 1.0
