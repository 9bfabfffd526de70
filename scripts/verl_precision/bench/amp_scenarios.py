"""Define the scenarios of bench-amp: models, sizes, and the arms that differ only in dtype."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from recipes.amp.environment import make_env
from recipes.amp.evolution.member import Policy, cloning_loss, play
from recipes.amp.ppo.algorithm import PPO, PPOConfig
from recipes.amp.trainer import FP16Trainer, FP16TrainingConfig
from recipes.amp.world_model import WorldModel, collect, world_model_loss
from verl_precision.bench.measurement import lacks_ampere

BASE = "fp32"
TF32 = "tf32"  # float32 whose products are computed in TF32
ARMS = {BASE: "float32", "fp16": "float16", "bf16": "bfloat16"}


def arms_on(device: torch.device) -> dict[str, str]:
    """Return the dtype of each arm that is measured on ``device``."""
    if device.type == "cpu" or lacks_ampere("TF32"):
        return ARMS
    return {BASE: ARMS[BASE], TF32: ARMS[BASE], **ARMS}


class Arm(NamedTuple):
    """Settings of a scenario in one repeat."""

    dtype: str
    seed: int
    device: torch.device


class BuiltArm(NamedTuple):
    """An arm with its model, optimizer and data."""

    trainer: FP16Trainer
    update: Callable[[], Any]  # the timed call; returns the loss, 0-d, or the return, None where no episode has ended
    items: int  # that an update processes, in the scenario's unit


def training(arm: Arm, model: torch.nn.Module, batches: Iterable[Any], loss: Callable, items: int) -> BuiltArm:
    """Build an arm that takes one ``training_step`` an update, over the batches again and again."""
    model.to(arm.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    trainer = FP16Trainer(model, optimizer, FP16TrainingConfig(dtype=arm.dtype, on_cpu=True))
    endless = itertools.cycle(batches)
    return BuiltArm(trainer, lambda: trainer.training_step(next(endless), loss), items)


def mlp(arm: Arm, width: int, layers: int, batch: int, inputs: int = 64, batches: int = 8) -> BuiltArm:
    """Build a regression on the sines of random projections, by a wide multilayer perceptron."""
    x = torch.randn(batches, batch, inputs, device=arm.device)
    y = (x @ torch.randn(inputs, inputs, device=arm.device) / inputs**0.5).sin()
    sizes = [inputs, *[width] * layers, inputs]
    modules = [part for pair in itertools.pairwise(sizes) for part in (torch.nn.Linear(*pair), torch.nn.GELU())][:-1]

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1])

    return training(arm, torch.nn.Sequential(*modules), list(zip(x, y, strict=True)), loss, batch)


def world_model(arm: Arm, hidden: int, latent: int, batch: int, length: int, batches: int = 4) -> BuiltArm:
    """Build the training of a world model, on stretches of Pendulum-v1."""
    data = collect(make_env("Pendulum-v1"), batches * batch * length, arm.seed, length)
    model = WorldModel(data.observations.shape[-1], data.actions.shape[-1], hidden, latent)
    model.set_statistics(data)
    stretches = [data.select(rows, arm.device) for rows in torch.randperm(len(data.rewards)).split(batch)]
    return training(arm, model, stretches, world_model_loss, batch * length)


def evolution(arm: Arm, hidden: int, batch: int, episodes: int = 16, batches: int = 4) -> BuiltArm:
    """Build a member's training: it clones what it played on CartPole-v1, weighted by return."""
    env, rng = make_env("CartPole-v1"), np.random.default_rng(arm.seed)
    policy = Policy(env, hidden)
    played = [play(env, policy, arm.seed + number, rng) for number in range(episodes)]
    observations = torch.from_numpy(np.concatenate([each.observations for each in played]))
    actions = torch.from_numpy(np.concatenate([each.actions for each in played]))
    returns = torch.cat([torch.full((len(each.actions),), each.total) for each in played])
    rows = torch.randint(len(actions), (batches, batch))
    drawn = [[values[of].to(arm.device) for values in (observations, actions, returns / returns.mean())] for of in rows]
    return training(arm, policy, drawn, cloning_loss, batch)


def ppo(arm: Arm, **settings: int) -> BuiltArm:
    """Build ``PPO.iterate`` on CartPole-v1: a rollout and the updates on it."""
    amp = arm.dtype != ARMS[BASE]
    steps = settings["num_envs"] * settings["num_steps"]
    # So many steps that the learning rate stays nearly the same.
    settings |= {"seed": arm.seed, "total_steps": 1000 * steps, "device": arm.device.type, "use_amp": amp}
    algorithm = PPO(PPOConfig(dtype=arm.dtype if amp else "float16", **settings))
    return BuiltArm(algorithm.trainer, lambda: algorithm.iterate()["return_mean"], steps)


class Scenario(NamedTuple):
    """A kind of training, in several sizes."""

    build: Callable[..., BuiltArm]  # (arm, **size); draws from torch's global generator, which is seeded before
    unit: str  # of the throughput, per second
    outcome: str  # what an update returns: "loss" or "return"
    sizes: dict[str, dict[str, int]]  # arguments of build and number of timed updates, by preset


MLP = {
    "small": {"width": 64, "layers": 2, "batch": 32, "updates": 4},
    "cpu": {"width": 512, "layers": 3, "batch": 512, "updates": 10},
    "cuda": {"width": 4096, "layers": 6, "batch": 8192, "updates": 10},
}
WORLD_MODEL = {
    "small": {"hidden": 32, "latent": 8, "batch": 4, "length": 20, "updates": 4},
    "cpu": {"hidden": 256, "latent": 64, "batch": 32, "length": 50, "updates": 10},
    "cuda": {"hidden": 2048, "latent": 512, "batch": 256, "length": 50, "updates": 10},
}
EVOLUTION = {
    "small": {"hidden": 32, "batch": 64, "updates": 4},
    "cpu": {"hidden": 1024, "batch": 2048, "updates": 20},
    "cuda": {"hidden": 8192, "batch": 32768, "updates": 10},
}
PPO_SIZES = {
    "small": {"hidden": 16, "layers": 1, "num_envs": 4, "num_steps": 32, "epochs": 1, "minibatches": 2, "updates": 3},
    "cpu": {"hidden": 256, "num_envs": 32, "num_steps": 64, "epochs": 4, "minibatches": 4, "updates": 6},
    "cuda": {"hidden": 2048, "num_envs": 2048, "num_steps": 32, "epochs": 8, "minibatches": 4, "updates": 4},
}
SCENARIOS = {
    "mlp": Scenario(mlp, "samples", "loss", MLP),
    "world_model": Scenario(world_model, "steps", "loss", WORLD_MODEL),
    "evolution": Scenario(evolution, "steps", "loss", EVOLUTION),
    "ppo": Scenario(ppo, "steps", "return", PPO_SIZES),
}
