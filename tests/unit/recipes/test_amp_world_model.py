"""The world model: its data, its open-loop predictions, and that it learns, counts overflows and refuses bad input."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

from lib.paths import REPO
from recipes.amp.checkpoint import InvalidCheckpointError
from recipes.amp.multiplication_dtypes import MultiplicationDtypes
from recipes.amp.trainer import FP16Trainer
from recipes.amp.trainer_config import FP16TrainingConfig
from recipes.amp.world_model.__main__ import main
from recipes.amp.world_model.config import WorldModelConfig
from recipes.amp.world_model.model import WorldModel
from recipes.amp.world_model.objective import open_loop_errors, world_model_loss
from recipes.amp.world_model.train import run, train
from recipes.amp.world_model.trajectories import Trajectories, collect

SMALL = {"steps": 600, "held_out_steps": 300, "length": 10, "context": 3, "hidden": 16, "latent": 4, "epochs": 3}


class Counter(gymnasium.Env):
    """Observes (step, last action) and ends at step 7; the reward is the step. One step may be invalid."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, spoil: str = "", at: int = 5):
        self.spoil, self.at = spoil, at

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.array([0.0, -1.0], np.float32), {}

    def step(self, action):
        self.count += 1
        spoilt = self.count == self.at
        spoil = {"nan": np.nan, "inf": np.inf}.get(self.spoil) if spoilt else None
        observation = np.array([self.count, action if spoil is None else spoil], np.float32)
        reward = float("inf") if spoilt and self.spoil == "reward" else float(self.count)
        return observation, reward, self.count == 7, False, {}


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A run that learns CartPole, and its folder."""
    out = tmp_path_factory.mktemp("world")
    config = WorldModelConfig(
        env="CartPole-v1", out=str(out), dtype="float32", device="cpu", steps=6000, held_out_steps=1500, length=20,
        context=4, hidden=64, latent=16, epochs=8,
    )  # fmt: skip
    return config, run(config), out


def cut_of_counter() -> Trajectories:
    return collect(Counter(), 17, seed=0, length=5, policy=lambda observation: int(observation[0]) % 3)


def test_trajectories_record_every_step():
    data = cut_of_counter()  # episodes of 7, 7 and 3 steps, cut after 5
    assert [int(each) for each in data.valid.sum(1)] == [5, 2, 5, 2, 3]
    assert data.observations[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert data.observations[1, :3, 0].tolist() == [5, 6, 7], "the next stretch must continue where the last one ended"
    assert data.actions[0].argmax(-1).tolist() == [0, 1, 2, 0, 1] and data.actions[0].sum(-1).eq(1).all()
    assert data.observations[0, 1:, 1].tolist() == [0, 1, 2, 0, 1], "an observation follows the action of its step"
    assert data.rewards[1].tolist() == [6, 7, 0, 0, 0] and data.ends[1].tolist() == [0, 1, 0, 0, 0]
    assert not data.ends[[0, 2, 4]].any() and not data.observations[1, 3:].any()


def test_time_limit_is_not_an_end():
    data = collect(gymnasium.wrappers.TimeLimit(Counter(), 4), 8, seed=0)
    assert data.observations[:, :5, 0].tolist() == [[0, 1, 2, 3, 4]] * 2 and not data.ends.any()
    cart = collect("CartPole-v1", 400, 0)
    assert cart.ends.sum() > 10 and cart.ends[cart.valid == 0].eq(0).all()
    assert len(cart.observations[:, 0].unique(dim=0)) == len(cart.observations), "episodes begin in different states"


def test_same_seed_collects_the_same_trajectories():
    one, two, other = (collect("Pendulum-v1", 100, seed) for seed in (3, 3, 4))
    assert all(a.equal(b) for a, b in zip(one, two, strict=True)) and not one.observations.equal(other.observations)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("nan", "env=Counter, step 5: component 1 of the observation is nan"),
        ("inf", "env=Counter, step 5: component 1 of the observation is inf"),
        ("reward", "env=Counter, step 5: the reward is inf"),
    ],
)
def test_nonfinite_value_is_refused_by_step_and_component(spoil, message):
    with pytest.raises(ValueError) as refused:
        collect(Counter(spoil), 20, seed=0)
    assert str(refused.value) == message


def test_statistics_exclude_padding():
    data = cut_of_counter()
    model = WorldModel(2, 3, 8, 4)
    model.set_statistics(data)
    counts = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    torch.testing.assert_close(model.observation_mean[0], counts.mean())
    torch.testing.assert_close(model.observation_std[0], counts.std(correction=0))
    constant = data._replace(rewards=torch.full_like(data.rewards, 0.3))
    model.set_statistics(constant)
    assert model.reward_std.item() == 1.0, "constant components must not be amplified"
    assert {"observation_mean", "action_std", "reward_std"} <= model.state_dict().keys()


def test_prediction_depends_on_the_context_alone():
    torch.manual_seed(0)
    model, data = WorldModel(2, 3, 8, 4), cut_of_counter()
    predicted = model.predict(data.observations, data.actions, 3)
    later, earlier = data.observations.clone(), data.observations.clone()
    later[:, 3:] = torch.nan
    earlier[:, 2] += 1.0
    unchanged, changed = (model.predict(observations, data.actions, 3) for observations in (later, earlier))
    assert all(a.equal(b) for a, b in zip(predicted, unchanged, strict=True))
    assert predicted.observations[:, :2].equal(changed.observations[:, :2]), "earlier predictions must not depend on it"
    assert (predicted.observations[:, 2:] != changed.observations[:, 2:]).any(-1).all()
    acted = data.actions.clone()
    acted[:, 4] = acted[:, 4].roll(1, -1)
    assert (model.predict(data.observations, acted, 3).observations[:, 4] != predicted.observations[:, 4]).any()
    for context in (0, 6):
        with pytest.raises(ValueError, match=f"^context={context} must be at least 1 and at most the 5 steps given$"):
            model.predict(data.observations, data.actions, context)


def test_loss_by_definition_excludes_padding():
    torch.manual_seed(0)
    data, model = cut_of_counter(), WorldModel(2, 3, 8, 4)
    model.set_statistics(data)
    loss = world_model_loss(model, data, 3)
    assert loss.ndim == 0 and loss.dtype == torch.float32
    predicted, parts = model(data.observations, data.actions, 3), {True: [], False: []}
    for row, step in data.valid.nonzero().tolist():
        true = (data.observations[row, step + 1] - model.observation_mean) / model.observation_std
        error = (predicted.observations[row, step] - true).square().mean()
        error += (predicted.rewards[row, step] - (data.rewards[row, step] - model.reward_mean) / model.reward_std)[
            0
        ] ** 2
        probability = predicted.ends[row, step].sigmoid()
        error -= torch.log(probability if data.ends[row, step] else 1 - probability)
        parts[step < 3].append(error)
    torch.testing.assert_close(loss, torch.stack(parts[True]).mean() + torch.stack(parts[False]).mean())
    padded = data._replace(rewards=torch.where(data.valid.bool(), data.rewards, 1e6))
    torch.testing.assert_close(world_model_loss(model, padded, 3), loss)


def test_open_loop_errors_by_hand():
    """A model that predicts only the mean, on one trajectory."""
    data = Trajectories(
        torch.tensor([[[0.0], [2.0], [4.0], [8.0], [99.0]]]),
        torch.zeros(1, 4, 1),
        torch.tensor([[1.0, 1.0, 2.0, 99.0]]),
        torch.zeros(1, 4),
        torch.tensor([[1.0, 1.0, 1.0, 0.0]]),
    )
    model = WorldModel(1, 1, 4, 2)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.observation_mean += 3.0
    model.observation_std *= 2.0
    model.reward_mean += 1.0
    model.reward_std *= 0.5
    errors = open_loop_errors(model, data, 2)  # of step 2 alone, which leads from 4 to 8; 2 was the last of the context
    assert errors == {"model": 2.5, "mean": 2.5, "last_value": 3.0, "reward": 2.0}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_weight_gets_a_gradient(dtype):
    torch.manual_seed(0)
    data, model = cut_of_counter(), WorldModel(2, 3, 16, 4)
    model.set_statistics(data)
    config = FP16TrainingConfig(dtype=dtype, on_cpu=True, loss_scale=1024.0)
    trainer = FP16Trainer(model, torch.optim.SGD(model.parameters(), 0.0), config)
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: gradients.update({name: p.grad.clone()}))
    trainer.training_step(data, lambda model, batch: world_model_loss(model, batch, 3))
    assert trainer.get_stats()["effective_dtype_share"] == {dtype: 1.0} and not trainer.skipped
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert {name.split(".")[1] for name in gradients if name.startswith("heads.")} == {"observation", "reward", "end"}
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients.values())


def test_training_and_evaluation_share_one_dtype():
    data = cut_of_counter()
    config = WorldModelConfig(out="-", device="cpu", dtype="bfloat16", **SMALL | {"epochs": 2})
    trainer, epochs = train(config, data, data)
    with MultiplicationDtypes() as observed:
        rows = list(epochs)
    assert observed.shares() == {"bfloat16": 1.0} == rows[-1]["effective_dtype_share"]
    assert trainer.optimizer.param_groups[0]["lr"] == config.lr / 2, "it falls linearly, over two epochs"


def test_training_lowers_the_open_loop_error(learned):
    config, rows, out = learned
    assert [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] == rows
    assert [row["epoch"] for row in rows] == list(range(1, config.epochs + 1))
    last = rows[-1]
    assert last["error/model"] < 0.5 * min(last["error/mean"], last["error/last_value"])
    assert last["error/model"] < 0.5 * rows[0]["error/model"] and last["train_loss"] < rows[0]["train_loss"]
    assert {row["effective_dtype"] for row in rows} == {"float32"} and not any(row["overflow_steps"] for row in rows)


def test_model_of_the_checkpoint_predicts(learned, tmp_path):
    config, rows, out = learned
    model = WorldModel.load(out / "checkpoint.pt")
    held_out = collect(config.env, config.held_out_steps, config.seed + 1, config.length)
    errors = open_loop_errors(model, held_out, config.context)
    assert errors == pytest.approx({name: rows[-1][f"error/{name}"] for name in errors})
    ends = model.predict(held_out.observations, held_out.actions, config.context).ends
    assert ((0 <= ends) & (ends <= 1)).all()
    half = tmp_path / "half.pt"
    half.write_bytes((out / "checkpoint.pt").read_bytes()[:5000])
    with pytest.raises(InvalidCheckpointError, match="half.pt: truncated"):
        WorldModel.load(half)
    other = torch.nn.Linear(2, 2)
    FP16Trainer(other, torch.optim.Adam(other.parameters()), FP16TrainingConfig(enabled=False)).save_checkpoint(half)
    with pytest.raises(InvalidCheckpointError, match="half.pt: not a checkpoint of a world model"):
        WorldModel.load(half)


def test_figure_shows_both_curves(learned):
    import matplotlib.image

    picture = (matplotlib.image.imread(learned[2] / "predictions.png")[..., :3] * 255).round().astype(int)
    assert min(picture.shape[:2]) > 500
    orange, red = ((np.abs(picture - color).sum(-1) < 12).sum() for color in ((255, 127, 14), (214, 39, 40)))
    assert orange > 1000 and red > 100, "predictions, and the mean's error"
    assert (picture.sum(-1) < 60).sum() > 1000, "the actual values"


def test_overflows_are_counted_per_epoch(tmp_path, capsys):
    config = WorldModelConfig(
        env="CartPole-v1", out=str(tmp_path / "run"), device="cpu", dtype="float16", loss_scale=2.0**22, **SMALL
    )
    rows = run(config)
    counts = [row["overflow_steps"] for row in rows]
    assert counts[0] > 0 and counts[-1] == 0
    assert [row["loss_scale"] for row in rows] == [2.0**22 / 2.0 ** sum(counts[: epoch + 1]) for epoch in range(3)]
    assert {row["effective_dtype"] for row in rows} == {"float16"}
    output = capsys.readouterr().out
    assert f"overflows {counts[0]} scale {rows[0]['loss_scale']:g} float16" in output


def test_same_seed_repeats_the_training(tmp_path):
    base = WorldModelConfig(env="Pendulum-v1", out="-", device="cpu", dtype="float32", **SMALL)
    runs = [run(replace(base, out=str(tmp_path / name), seed=seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    one, two, other = ([row | {"seconds": 0} for row in rows] for rows in runs)
    assert one == two and one != other


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env", "CartPol-v1"], "env=CartPol-v1 is unknown to Gymnasium; did you mean CartPole-v1"),
        (["--env", "nowhere:X-v0"], "env=nowhere:X-v0 cannot be created: No module named 'nowhere'"),
        (["--env", "a:b:C-v1"], "env=a:b:C-v1 must be NAME or MODULE:NAME"),
        (["--env", ":CartPole-v1"], "env=:CartPole-v1 must be NAME or MODULE:NAME"),
        (["--env", ".x:Foo-v1"], "env=.x:Foo-v1 must be NAME or MODULE:NAME"),
        (["--length", "1"], "length=1 must be at least 2"),
        (["--context", "50"], "context=50 must be at least 1 and below length=50"),
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--lr", "nan"], "lr=nan must be positive"),
        (["--seed", "-1"], "seed=-1 must be from 0 to 2147483647"),
        (["--dtype", "int8"], "dtype=int8 is not a dtype to compute in"),
        (["--device", "tpu"], "device=tpu must be auto, cpu or cuda"),
        (["--loss-scale", "0"], "loss_scale=0.0 must be positive"),
        (["--out", ""], "out= must be a folder: --out DIR"),
        (["--env", "CartPole-v1", "--length", "90", "--context", "89"], "context=89 must be below"),
    ],
)  # fmt: skip
def test_invalid_setting_is_one_line_and_leaves_nothing(words, message, monkeypatch, tmp_path):
    out = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["world_model", "--out", str(out), "--steps", "300", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value).startswith(f"recipes.amp.world_model: {message}") and "\n" not in str(ended.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "float16", "--loss-scale", "3e38"], "32 optimizer steps in a row overflowed"),
        (["--dtype", "float32", "--lr", "1e30"], "32 updates in a row had no finite gradients in float32"),
    ],
)
def test_consecutive_overflows_are_one_line(words, message, monkeypatch, tmp_path):
    small = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = ["world_model", "--env", "CartPole-v1", "--out", str(tmp_path), "--device", "cpu", *small]
    monkeypatch.setattr(sys, "argv", [*command, "--epochs", "20", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value).startswith(f"recipes.amp.world_model: {message}") and "\n" not in str(ended.value)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in lines]
    assert ("float16" in words) or any(row["train_loss"] is None for row in rows)


def test_results_are_not_overwritten(learned):
    config, _, out = learned
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(ValueError, match="must be a folder without results"):
        run(replace(config, steps=50, held_out_steps=50))
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_command_without_cuda_falls_back_to_fp32_with_a_warning(tmp_path):
    """fp16 is the default; without ``--device cpu`` a machine without CUDA trains in fp32."""
    words = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "recipes.amp.world_model", "--env", "Pendulum-v1", "--out", tmp_path, *words]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "training in float32, not float16" in done.stderr and "epoch 3/3 loss" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {row["effective_dtype"] for row in rows} == {"float32"}
