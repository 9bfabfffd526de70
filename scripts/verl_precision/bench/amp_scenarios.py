"""Define the scenarios of bench_amp: models, sizes, and the arms that differ only in dtype."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recipes.amp.environment import make_env
from recipes.amp.evolution.member import cloning_loss
from recipes.amp.evolution.trajectory import Policy, play
from recipes.amp.ppo.algorithm import PPO, PPOConfig
from recipes.amp.trainer import FP16Trainer
from recipes.amp.trainer_config import FP16TrainingConfig
from recipes.amp.world_model import WorldModel, collect, world_model_loss
from verl_precision.bench.gpu_formats import lacks_ampere

BASE = "fp32"
TF32 = "tf32"  # float32 whose products are computed in TF32
ARMS = {BASE: "float32", "fp16": "float16", "bf16": "bfloat16"}
CLIP = 1.0


def no_tf32(device: torch.device) -> str:
    """Return why the arm of TF32 is left out on ``device``, "" where it is measured."""
    return lacks_ampere("TF32") if device.type == "cuda" else "no CUDA device"


def arms_on(device: torch.device) -> dict[str, str]:
    """Return the dtype of each arm that is measured on ``device``."""
    return ARMS if no_tf32(device) else {BASE: ARMS[BASE], TF32: ARMS[BASE], **ARMS}


@dataclass(frozen=True)
class Arm:
    """Settings of a scenario in one repeat."""

    dtype: str
    seed: int
    device: torch.device
    on_cpu: bool = True  # compute in 16 bits on a CPU too

    def trainer(self, model: torch.nn.Module, lr: float) -> FP16Trainer:
        """Return a trainer of ``model``, on the arm's device, under fused AdamW."""
        model.to(self.device)
        config = FP16TrainingConfig(dtype=self.dtype, on_cpu=self.on_cpu, max_grad_norm=CLIP)
        return FP16Trainer(model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True), config)


@dataclass(frozen=True)
class BuiltArm:
    """An arm with its model, optimizer and data."""

    trainer: FP16Trainer
    update: Callable[[], Any]  # the timed call; returns the loss, 0-d, or the return, None where no episode has ended
    items: int  # that an update processes, in the scenario's unit


def training(trainer: FP16Trainer, batches: Iterable[Any], loss: Callable, items: int) -> BuiltArm:
    """Build an arm that takes one ``training_step`` an update, over the batches again and again."""
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

    return training(arm.trainer(torch.nn.Sequential(*modules), 1e-3), list(zip(x, y, strict=True)), loss, batch)


class CausalTransformer(torch.nn.Module):
    """torch's own encoder layers under a causal mask."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int):
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.positions = torch.nn.Parameter(torch.randn(length, width) * 0.02)
        layer = torch.nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens (B, T) -> logits (B, T, V)."""
        hidden = self.layers(self.tokens(tokens) + self.positions, mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


def transformer(
    arm: Arm, vocabulary: int, width: int, layers: int, heads: int, length: int, batch: int, batches: int = 8
) -> BuiltArm:
    """Build the prediction of arithmetic progressions modulo the vocabulary, whose step differs from row to row."""
    start = torch.randint(vocabulary, (batches, batch, 1), device=arm.device)
    step = torch.randint(1, 17, (batches, batch, 1), device=arm.device)
    rows = (start + step * torch.arange(length + 1, device=arm.device)) % vocabulary

    def loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())

    model = CausalTransformer(vocabulary, width, layers, heads, length)
    return training(arm.trainer(model, 3e-4), list(rows), loss, batch * length)


def world_model(arm: Arm, hidden: int, latent: int, batch: int, length: int, batches: int = 4) -> BuiltArm:
    """Build the training of a world model, on stretches of Pendulum-v1."""
    data = collect("Pendulum-v1", batches * batch * length, arm.seed, length)
    model = WorldModel(data.observations.shape[-1], data.actions.shape[-1], hidden, latent)
    model.set_statistics(data)
    stretches = [data.at(rows).to(arm.device) for rows in torch.randperm(len(data.rewards)).split(batch)]
    return training(arm.trainer(model, 1e-3), stretches, world_model_loss, batch * length)


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
    return training(arm.trainer(policy, 1e-3), drawn, cloning_loss, batch)


def ppo(arm: Arm, **settings: int) -> BuiltArm:
    """Build ``PPO.iterate`` on CartPole-v1: a rollout and the updates on it."""
    amp = arm.dtype != ARMS[BASE]
    device = "auto" if arm.device.type == "cpu" and not arm.on_cpu else arm.device.type
    steps = settings["num_envs"] * settings["num_steps"]
    # So many steps that the learning rate stays nearly the same.
    settings |= {"seed": arm.seed, "total_steps": 1000 * steps, "device": device, "use_amp": amp}
    algorithm = PPO(PPOConfig(dtype=arm.dtype if amp else "float16", **settings))
    return BuiltArm(algorithm.trainer, lambda: algorithm.iterate()["return_mean"], steps)


@dataclass(frozen=True)
class Scenario:
    """A kind of training, in several sizes."""

    build: Callable[..., BuiltArm]  # (arm, **size); draws from torch's global generator, which is seeded before
    unit: str  # of the throughput, per second
    sizes: dict[str, dict[str, int]]  # arguments of build and number of timed updates, by preset
    outcome: str = "loss"  # what an update returns: "loss" or "return"


def sizes(names: str, **presets: Sequence[int]) -> dict[str, dict[str, int]]:
    """Return ``{preset: {name: value}}``."""
    return {preset: dict(zip(names.split(), values, strict=True)) for preset, values in presets.items()}


SCENARIOS = {
    "mlp": Scenario(
        mlp,
        "samples",
        sizes("width layers batch updates", small=(64, 2, 32, 4), cpu=(512, 3, 512, 10), cuda=(4096, 6, 8192, 10)),
    ),
    "transformer": Scenario(
        transformer,
        "tokens",
        sizes(
            "vocabulary width layers heads length batch updates",
            small=(64, 32, 1, 2, 16, 4, 4),
            cpu=(256, 128, 2, 4, 64, 8, 10),
            cuda=(8192, 1024, 12, 16, 1024, 4, 10),
        ),
    ),
    "world_model": Scenario(
        world_model,
        "steps",
        sizes(
            "hidden latent batch length updates",
            small=(32, 8, 4, 20, 4),
            cpu=(256, 64, 32, 50, 10),
            cuda=(2048, 512, 256, 50, 10),
        ),
    ),
    "evolution": Scenario(
        evolution,
        "steps",
        sizes("hidden batch updates", small=(32, 64, 4), cpu=(1024, 2048, 20), cuda=(8192, 32768, 10)),
    ),
    "ppo": Scenario(
        ppo,
        "steps",
        sizes(
            "hidden layers num_envs num_steps epochs minibatches updates",
            small=(16, 1, 4, 32, 1, 2, 3),
            cpu=(256, 2, 32, 64, 4, 4, 6),
            cuda=(2048, 2, 2048, 32, 8, 4, 4),
        ),
        outcome="return",
    ),
}
