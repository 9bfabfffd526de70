"""The world model: its data, its open-loop predictions, and that it learns, counts overflows and reports its dtype."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from amp_commands import records
from amp_trainer_cases import DTYPES, trainer

from recipes.amp.checkpoint import read_checkpoint
from recipes.amp.multiplication_dtypes import MultiplicationDtypes
from recipes.amp.world_model import (
    Trajectories,
    WorldModel,
    WorldModelConfig,
    collect,
    new_trainer,
    open_loop_errors,
    run,
    train,
    world_model_loss,
)

SMALL = {"steps": 600, "held_out_steps": 300, "length": 10, "context": 3, "hidden": 16, "latent": 4, "epochs": 3}
TINY = WorldModelConfig(env="CartPole-v1", out="-", device="cpu", **SMALL)


@pytest.fixture
def data() -> Trajectories:
    """Episodes of 7, 7 and 3 steps, cut after 5."""
    return collect(
        gymnasium.make("Counter-v0"), 17, seed=0, length=5, policy=lambda observation: int(observation[0]) % 3
    )


def test_trajectories_record_every_step(data):
    assert [int(each) for each in data.valid.sum(1)] == [5, 2, 5, 2, 3]
    assert data.observations[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert data.observations[1, :3, 0].tolist() == [5, 6, 7], "the next stretch must continue where the last one ended"
    assert data.actions[0].argmax(-1).tolist() == [0, 1, 2, 0, 1] and data.actions[0].sum(-1).eq(1).all()
    assert data.observations[0, 1:, 1].tolist() == [0, 1, 2, 0, 1], "an observation follows the action of its step"
    assert data.rewards[1].tolist() == [6, 7, 0, 0, 0] and data.ends[1].tolist() == [0, 1, 0, 0, 0]
    assert not data.ends[[0, 2, 4]].any() and not data.observations[1, 3:].any()


def test_time_limit_is_not_an_end():
    data = collect(gymnasium.make("Counter-v0", max_episode_steps=4), 8, seed=0, length=50)
    assert data.observations[:, :5, 0].tolist() == [[0, 1, 2, 3, 4]] * 2 and not data.ends.any()
    cart = collect(gymnasium.make("CartPole-v1"), 400, 0, 50)
    assert cart.ends.sum() > 10 and cart.ends[cart.valid == 0].eq(0).all()
    assert len(cart.observations[:, 0].unique(dim=0)) == len(cart.observations), "episodes begin in different states"


@pytest.mark.parametrize("name", ["observed", "rewarded"])
def test_nonfinite_value_is_refused_by_step(name):
    with pytest.raises(
        ValueError, match="^env=Counter-v0, seed 0, step 5: the observation or the reward.* not finite$"
    ):
        collect(gymnasium.make("Counter-v0", **{name: np.inf}), 20, seed=0, length=50)


def test_statistics_exclude_padding(data):
    model = WorldModel(2, 3, 8, 4)
    model.set_statistics(data)
    counts = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    torch.testing.assert_close(model.observation_mean[0], counts.mean())
    torch.testing.assert_close(model.observation_std[0], counts.std(correction=0))
    constant = data._replace(rewards=torch.full_like(data.rewards, 0.3))
    model.set_statistics(constant)
    assert model.reward_std.item() == 1.0, "constant components must not be amplified"


def test_prediction_depends_on_the_context_alone(data):
    torch.manual_seed(0)
    model = WorldModel(2, 3, 8, 4)
    predicted = model.predict(data.observations, data.actions, 3)
    later, earlier = data.observations.clone(), data.observations.clone()
    later[:, 3:] = torch.nan
    earlier[:, 2] += 1.0
    unchanged, changed = (model.predict(observations, data.actions, 3) for observations in (later, earlier))
    assert all(a.equal(b) for a, b in zip(predicted, unchanged, strict=True))
    assert predicted.observations[:, :2].equal(changed.observations[:, :2]), "earlier predictions must not depend on it"
    assert (predicted.observations[:, 2:] != changed.observations[:, 2:]).any(-1).all()
    with pytest.raises(ValueError, match="^context=6 must be at least 1 and at most the 5 steps given$"):
        model.predict(data.observations, data.actions, 6)


def test_loss_by_definition_excludes_padding(data):
    torch.manual_seed(0)
    model = WorldModel(2, 3, 8, 4)
    model.set_statistics(data)
    loss = world_model_loss(model, data, 3)
    assert loss.ndim == 0 and loss.dtype == torch.float32
    predicted, parts = model(data.observations, data.actions, 3), {True: [], False: []}
    for row, step in data.valid.nonzero().tolist():
        true = (data.observations[row, step + 1] - model.observation_mean) / model.observation_std
        error = (predicted.observations[row, step] - true).square().mean()
        reward = (data.rewards[row, step] - model.reward_mean[0]) / model.reward_std[0]
        error += (predicted.rewards[row, step] - reward) ** 2
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
    errors = open_loop_errors(model, data, 2)  # of step 2 only, which leads from 4 to 8; 2 was the last of the context
    assert errors == {"model": 2.5, "mean": 2.5, "last_value": 3.0, "reward": 2.0}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_weight_gets_a_gradient(dtype, data):
    torch.manual_seed(0)
    model = WorldModel(2, 3, 16, 4)
    model.set_statistics(data)
    trained = trainer(model, torch.optim.SGD, lr=0.0, dtype=dtype)
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: gradients.update({name: p.grad.clone()}))
    trained.training_step(data, lambda model, batch: world_model_loss(model, batch, 3))
    assert trained.get_stats()["effective_dtype_share"] == {dtype: 1.0} and not trained.skipped
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients.values())


def test_training_and_evaluation_share_one_dtype_and_repeat_by_seed(data):
    config, losses = replace(TINY, dtype="bfloat16", epochs=2), []
    for seed in (2, 1, 1):
        seeded = replace(config, seed=seed)
        trained = new_trainer(seeded, data)
        with MultiplicationDtypes() as observed:
            rows = list(train(trained, seeded, data, data))
        losses.append([(row["train_loss"], row["error/model"]) for row in rows])
    assert losses[1] == losses[2] != losses[0]
    assert observed.shares() == {"bfloat16": 1.0} == rows[-1]["effective_dtype_share"]
    assert trained.optimizer.param_groups[0]["lr"] == config.lr / 2, "it falls linearly, over two epochs"


@pytest.mark.subprocess
def test_training_lowers_the_open_loop_error(tmp_path):
    """On CartPole. The saved model predicts as the trained one."""
    sizes = {"steps": 6000, "held_out_steps": 1500, "length": 20, "context": 4, "hidden": 64, "latent": 16, "epochs": 8}
    config = WorldModelConfig(env="CartPole-v1", out=str(tmp_path), dtype="float32", device="cpu", **sizes)
    rows = run(config)
    assert records(tmp_path) == rows and [row["epoch"] for row in rows] == list(range(1, config.epochs + 1))
    first, last = rows[0], rows[-1]
    assert last["error/model"] < 0.5 * min(last["error/mean"], last["error/last_value"])
    assert last["error/model"] < 0.5 * first["error/model"] and last["train_loss"] < first["train_loss"]
    held_out = collect(gymnasium.make(config.env), config.held_out_steps, config.seed + 1, config.length)
    saved = read_checkpoint(tmp_path / "checkpoint.pt")
    model = WorldModel(**saved["extra"]["sizes"])
    model.load_state_dict(saved["model"])
    errors = open_loop_errors(model, held_out, config.context)
    assert errors == pytest.approx({name: last[f"error/{name}"] for name in errors})


def test_overflows_are_counted_per_epoch(tmp_path, capsys):
    rows = run(replace(TINY, out=str(tmp_path), dtype="float16", loss_scale=2.0**22))
    counts = [row["overflow_steps"] for row in rows]
    assert counts[0] > 0 and counts[-1] == 0
    assert [row["loss_scale"] for row in rows] == [2.0**22 / 2.0 ** sum(counts[: epoch + 1]) for epoch in range(3)]
    assert {row["effective_dtype"] for row in rows} == {"float16"}
    assert f"overflows {counts[0]} scale {rows[0]['loss_scale']:g} float16" in capsys.readouterr().out


def test_run_without_cuda_falls_back_to_fp32_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="training in float32, not float16"):
        rows = run(replace(TINY, env="Pendulum-v1", out=str(tmp_path), device="auto", dtype="float16"))
    assert {row["effective_dtype"] for row in rows} == {"float32"}
