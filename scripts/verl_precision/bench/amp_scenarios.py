"""Define the scenarios of bench_amp: models, sizes, and the arms that differ only in dtype."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recipes.amp.environment import make_env
from recipes.amp.evolution.member import cloning_loss
from recipes.amp.evolution.trajectory import Policy, play
from recipes.amp.ppo.algorithm import PPO
from recipes.amp.ppo.config import PPOConfig
from recipes.amp.trainer import FP16Trainer
from recipes.amp.trainer_config import FP16TrainingConfig
from recipes.amp.world_model.model import WorldModel
from recipes.amp.world_model.objective import world_model_loss
from recipes.amp.world_model.trajectories import collect
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
    """Settings of a scenario in one repeat: dtype, seed and device.

    Args:
        on_cpu: whether to compute in 16 bits on a CPU too.
    """

    dtype: str
    seed: int
    device: torch.device
    on_cpu: bool = True

    def trainer(self, model: torch.nn.Module, lr: float) -> FP16Trainer:
        """Return a trainer of ``model``, on the arm's device, under fused AdamW."""
        model.to(self.device)
        config = FP16TrainingConfig(dtype=self.dtype, on_cpu=self.on_cpu, max_grad_norm=CLIP)
        return FP16Trainer(model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True), config)


@dataclass(frozen=True)
class BuiltArm:
    """An arm with its model, optimizer and data.

    Attributes:
        update: the timed call; returns the loss, 0-d, or the return, ``None`` where no episode has ended.
        items: number of items an update processes, in the scenario's unit.
    """

    trainer: FP16Trainer
    update: Callable[[], Any]
    items: int


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
    settings |= {"seed": arm.seed, "total_steps": steps, "anneal": False, "device": device, "use_amp": amp}
    algorithm = PPO(PPOConfig(dtype=arm.dtype if amp else "float16", **settings))
    return BuiltArm(algorithm.trainer, lambda: algorithm.iterate()["return_mean"], steps)


@dataclass(frozen=True)
class Scenario:
    """A kind of training, in several sizes.

    Attributes:
        build: ``(arm, **size) -> BuiltArm``; draws from torch's global generator, which is seeded before.
        unit: of the throughput, per second.
        sizes: the arguments of ``build`` and the number of timed ``updates``, by preset.
        outcome: what an update returns: "loss" or "return".
    """

    build: Callable[..., BuiltArm]
    unit: str
    sizes: dict[str, dict[str, int]]
    outcome: str = "loss"


SCENARIOS = {
    "mlp": Scenario(
        mlp,
        "samples",
        {
            "small": {"width": 64, "layers": 2, "batch": 32, "updates": 4},
            "cpu": {"width": 512, "layers": 3, "batch": 512, "updates": 10},
            "cuda": {"width": 4096, "layers": 6, "batch": 8192, "updates": 10},
        },
    ),
    "transformer": Scenario(
        transformer,
        "tokens",
        {
            "small": {"vocabulary": 64, "width": 32, "layers": 1, "heads": 2, "length": 16, "batch": 4, "updates": 4},
            "cpu": {"vocabulary": 256, "width": 128, "layers": 2, "heads": 4, "length": 64, "batch": 8, "updates": 10},
            "cuda": {
                "vocabulary": 8192,
                "width": 1024,
                "layers": 12,
                "heads": 16,
                "length": 1024,
                "batch": 4,
                "updates": 10,
            },
        },
    ),
    "world_model": Scenario(
        world_model,
        "steps",
        {
            "small": {"hidden": 32, "latent": 8, "batch": 4, "length": 20, "updates": 4},
            "cpu": {"hidden": 256, "latent": 64, "batch": 32, "length": 50, "updates": 10},
            "cuda": {"hidden": 2048, "latent": 512, "batch": 256, "length": 50, "updates": 10},
        },
    ),
    "evolution": Scenario(
        evolution,
        "steps",
        {
            "small": {"hidden": 32, "batch": 64, "updates": 4},
            "cpu": {"hidden": 1024, "batch": 2048, "updates": 20},
            "cuda": {"hidden": 8192, "batch": 32768, "updates": 10},
        },
    ),
    "ppo": Scenario(
        ppo,
        "steps",
        {
            "small": {
                "hidden": 16,
                "layers": 1,
                "num_envs": 4,
                "num_steps": 32,
                "epochs": 1,
                "minibatches": 2,
                "updates": 3,
            },
            "cpu": {
                "hidden": 256,
                "layers": 2,
                "num_envs": 32,
                "num_steps": 64,
                "epochs": 4,
                "minibatches": 4,
                "updates": 6,
            },
            "cuda": {
                "hidden": 2048,
                "layers": 2,
                "num_envs": 2048,
                "num_steps": 32,
                "epochs": 8,
                "minibatches": 4,
                "updates": 4,
            },
        },
        outcome="return",
    ),
}
