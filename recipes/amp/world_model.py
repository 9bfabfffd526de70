"""Train a recurrent world model of an environment in 16 bits.

    python -m recipes.amp.world_model --env Pendulum-v1 --out /tmp/world                 fp16 on a GPU, fp32 on a CPU
    python -m recipes.amp.world_model --env Pendulum-v1 --out /tmp/world --device cpu    fp16 on a CPU too, slowly

``h[t+1] = GRU(h[t], [z[t], a[t]])`` with ``z[t]`` the encoded observation, or a learned vector where no observation is
given. From ``h[t+1]`` three heads predict the next observation, the reward and the end of the episode. The first
``context`` observations of a trajectory are given; all later ones are predicted from the actions only. OUT gets
metrics.jsonl and checkpoint.pt, whose ``read_checkpoint(…)["extra"]["sizes"]`` are the arguments of WorldModel.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple, Optional

import gymnasium
import numpy as np
import torch
from gymnasium.spaces.utils import flatdim, flatten
from torch import nn
from torch.nn import functional as F

from recipes.amp.environment import make_env, play_episode
from recipes.amp.options import append_record, check_values, new_folder, option, parse_config, resolve_device
from recipes.amp.trainer import FP16Trainer, FP16TrainingConfig
from verl.utils.precision import LossScaleError

PROGRAM = "recipes.amp.world_model"
CONTEXT = 10  # observations given by default


@dataclass(frozen=True)
class WorldModelConfig:
    """Settings of the collection of trajectories and of the training on them."""

    env: str = option("Pendulum-v1", "a Gymnasium environment")
    out: str = option("", "a new folder for the results")
    seed: int = option(0, "seed of the environment, the policy, the weights and the batches", "from 0 to 2147483647")
    device: str = option("auto", "auto, cpu or cuda; auto trains in float32 on a CPU")
    dtype: str = option("float16", "float16, bfloat16 or float32")
    steps: int = option(40000, "environment steps to train on", "at least 1")
    held_out_steps: int = option(4000, "environment steps to evaluate on", "at least 1")
    length: int = option(50, "most steps of a trajectory; a longer episode is split")
    context: int = option(CONTEXT, "observations given to the model before it predicts from the actions only")
    hidden: int = option(128, "size of the recurrent state and of the hidden layers", "at least 1")
    latent: int = option(32, "size of an encoded observation", "at least 1")
    epochs: int = option(30, "passes over the trajectories", "at least 1")
    batch_size: int = option(16, "trajectories per training step", "at least 1")
    lr: float = option(4e-3, "learning rate of Adam in the first epoch; it falls linearly towards 0", "positive")
    loss_scale: float = option(65536.0, "initial loss scale, in float16")

    def __post_init__(self):
        context = (1 <= self.context < self.length, f"at least 1 and below length={self.length}")
        check_values(self, {"context": context})
        self.trainer  # noqa: B018

    @property
    def trainer(self) -> FP16TrainingConfig:
        """Return the trainer's settings."""
        return FP16TrainingConfig(dtype=self.dtype, on_cpu=resolve_device(self.device)[1], loss_scale=self.loss_scale)


class Trajectories(NamedTuple):
    """N stretches of episodes, T steps each at most; after its end a stretch is zero and not ``valid``."""

    observations: torch.Tensor  # (N, T + 1, O), the last is where the last action led
    actions: torch.Tensor  # (N, T, A), a discrete one as one-hot
    rewards: torch.Tensor  # (N, T)
    ends: torch.Tensor  # (N, T), 1 where the environment terminated; a time limit does not
    valid: torch.Tensor  # (N, T), 1 where there is a step

    def select(self, rows: torch.Tensor, device: torch.device) -> "Trajectories":
        """Return the stretches at these indices, on ``device``."""
        return Trajectories(*(each[rows].to(device) for each in self))


def collect(
    env: gymnasium.Env, steps: int, seed: int, length: int, policy: Optional[Callable[[Any], Any]] = None
) -> Trajectories:
    """Act in an environment for ``steps`` steps, in episodes from the resets of ``seed``.

    An episode of more than ``length`` steps (T) continues in the next stretch. Spaces other than boxes are flattened as
    Gymnasium does. Without a ``policy`` (observation -> action), actions are sampled.
    """
    env.action_space.seed(seed)
    policy = policy or (lambda observation: env.action_space.sample())
    stretches: list[list[tuple]] = []
    remaining = steps
    while remaining:
        played = list(islice(play_episode(env, policy, seed if remaining == steps else None), remaining))
        remaining -= len(played)
        stretches += [played[first : first + length] for first in range(0, len(played), length)]
    shapes = (length + 1, flatdim(env.observation_space)), (length, flatdim(env.action_space)), *[(length,)] * 3
    data = Trajectories(*(torch.zeros(len(stretches), *shape) for shape in shapes))
    for row, taken in enumerate(stretches):
        before, actions, rewards, ends, after = zip(*taken, strict=True)
        actions = [flatten(env.action_space, action) for action in actions]
        series = (before + after[-1:], actions, rewards, ends, [1.0] * len(taken))
        for tensor, values in zip(data, series, strict=True):
            tensor[row, : len(values)] = torch.from_numpy(np.array(values, dtype=np.float32))
    return data


class Prediction(NamedTuple):
    """Predicted observation, reward and end of the episode after each action."""

    observations: torch.Tensor  # (N, T, O)
    rewards: torch.Tensor  # (N, T)
    ends: torch.Tensor  # (N, T), logits from forward, probabilities from predict


class WorldModel(nn.Module):
    """Encoder, GRU and three heads; its input and its predictions are in the environment's own units.

    ``hidden`` is the size of the recurrent state and of each head's hidden layer, ``latent`` of an encoded observation.
    """

    def __init__(self, observation_size: int, action_size: int, hidden: int, latent: int):
        super().__init__()
        self.sizes = {"observation_size": observation_size, "action_size": action_size}
        self.sizes |= {"hidden": hidden, "latent": latent}
        self.encoder = nn.Sequential(nn.Linear(observation_size, hidden), nn.SiLU(), nn.Linear(hidden, latent))
        self.unseen = nn.Parameter(torch.zeros(latent))
        self.dynamics = nn.GRU(latent + action_size, hidden, batch_first=True)
        heads = {
            name: nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, size))
            for name, size in (("observation", observation_size), ("reward", 1), ("end", 1))
        }
        self.heads = nn.ModuleDict(heads)
        for name, size in (("observation", observation_size), ("action", action_size), ("reward", 1)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))

    def set_statistics(self, data: Trajectories) -> None:
        """Normalize by the mean and the standard deviation of these trajectories; a constant is not scaled."""
        valid = data.valid.bool()
        for name, values in (
            ("observation", data.observations[:, 1:][valid]),
            ("action", data.actions[valid]),
            ("reward", data.rewards[valid][:, None]),
        ):
            std, mean = torch.std_mean(values, 0, correction=0)
            getattr(self, f"{name}_mean").copy_(mean)
            getattr(self, f"{name}_std").copy_(torch.where(std > 1e-6 * (1 + mean.abs()), std, 1.0))

    def forward(self, observations: torch.Tensor, actions: torch.Tensor, context: int) -> Prediction:
        """observations (N, at least context, O), actions (N, T, A) -> normalized predictions in fp32, ends as logits.

        Observations from ``context`` on are not read.
        """
        encoded = self.encoder((observations[:, :context] - self.observation_mean) / self.observation_std)
        unseen = self.unseen.to(encoded.dtype).expand(len(actions), actions.shape[1] - context, -1)
        taken = (actions - self.action_mean) / self.action_std
        states, _ = self.dynamics(torch.cat([torch.cat([encoded, unseen], 1), taken.to(encoded.dtype)], -1))
        observation, reward, end = (head(states).float() for head in self.heads.values())
        return Prediction(observation, reward.squeeze(-1), end.squeeze(-1))

    @torch.no_grad()
    def predict(self, observations: torch.Tensor, actions: torch.Tensor, context: int) -> Prediction:
        """Predict what follows each action, in the environment's units, ends as probabilities; see :meth:`forward`."""
        steps = min(observations.shape[1], actions.shape[1])
        if not 1 <= context <= steps:
            raise ValueError(f"context={context} must be at least 1 and at most the {steps} steps given")
        observation, reward, end = self(observations, actions, context)
        observation = observation * self.observation_std + self.observation_mean
        return Prediction(observation, reward * self.reward_std + self.reward_mean, end.sigmoid())


def mean_over(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the mean of values (N, T) by weights (N, T); 0 where all weights are 0."""
    return (values * weights).sum() / weights.sum().clamp(min=1.0)


def world_model_loss(model: nn.Module, batch: Trajectories, context: int = CONTEXT) -> torch.Tensor:
    """Return the one-step error of the steps in the context, plus the open-loop error of those after it; 0-d, in fp32.

    An error is squared, in standard deviations, of observation (mean of its components) and reward, plus the cross
    entropy of the end.
    """
    predicted = model(batch.observations, batch.actions, context)
    with torch.autocast(batch.rewards.device.type, enabled=False):
        observations = (batch.observations[:, 1:] - model.observation_mean) / model.observation_std
        rewards = (batch.rewards - model.reward_mean) / model.reward_std
        error = (predicted.observations - observations).square().mean(-1) + (predicted.rewards - rewards).square()
        error = error + F.binary_cross_entropy_with_logits(predicted.ends, batch.ends, reduction="none")
        parts = slice(None, context), slice(context, None)
        return sum(mean_over(error[:, part], batch.valid[:, part]) for part in parts)


def open_loop_errors(model: WorldModel, data: Trajectories, context: int) -> dict[str, float]:
    """Return root mean square errors after the context, in standard deviations of the training data.

    ``model`` and ``reward`` are of the model's predictions of observation and reward; ``mean`` and ``last_value`` of
    observations that are predicted by their mean, and by the last one of the context.
    """
    predicted = model.predict(data.observations, data.actions, context)
    true, last = data.observations[:, 1:], data.observations[:, context - 1 : context]
    squares = {
        "model": ((predicted.observations - true) / model.observation_std).square().mean(-1),
        "mean": ((model.observation_mean - true) / model.observation_std).square().mean(-1),
        "last_value": ((last - true) / model.observation_std).square().mean(-1),
        "reward": ((predicted.rewards - data.rewards) / model.reward_std).square(),
    }
    valid = data.valid[:, context:]
    return {name: mean_over(each[:, context:], valid).sqrt().item() for name, each in squares.items()}


def new_trainer(config: WorldModelConfig, data: Trajectories) -> FP16Trainer:
    """Return the trainer of a new model, normalized by the training data."""
    torch.manual_seed(config.seed)
    model = WorldModel(data.observations.shape[-1], data.actions.shape[-1], config.hidden, config.latent)
    model.set_statistics(data)
    model.to(resolve_device(config.device)[0])
    return FP16Trainer(model, torch.optim.Adam(model.parameters(), lr=config.lr), config.trainer)


def train(
    trainer: FP16Trainer, config: WorldModelConfig, data: Trajectories, held_out: Trajectories
) -> Iterator[dict[str, Any]]:
    """Train, and yield a row of metrics per epoch; errors on the held-out data are in the trainer's dtype too."""
    held_out = held_out.select(torch.arange(len(held_out.rewards)), trainer.device)
    order = torch.Generator().manual_seed(config.seed)
    for epoch in range(1, config.epochs + 1):
        began, before, losses = time.perf_counter(), trainer.overflow_steps, []
        for group in trainer.optimizer.param_groups:
            group["lr"] = config.lr * (1 - (epoch - 1) / config.epochs)
        for rows in torch.randperm(len(data.rewards), generator=order).split(config.batch_size):
            batch = data.select(rows, trainer.device)
            losses.append(trainer.training_step(batch, lambda *given: world_model_loss(*given, config.context)))
        with trainer.autocast():
            errors = open_loop_errors(trainer.module, held_out, config.context)
        stats = trainer.get_stats()
        yield {
            "epoch": epoch,
            "train_loss": torch.stack(losses).mean().item(),
            **{f"error/{name}": value for name, value in errors.items()},
            "overflow_steps": trainer.overflow_steps - before,
            "training_steps": stats["training_steps"],
            "loss_scale": stats["current_scale"],
            "effective_dtype": stats["effective_dtype"],
            "effective_dtype_share": stats["effective_dtype_share"],
            "seconds": round(time.perf_counter() - began, 3),
        }


def run(config: WorldModelConfig) -> list[dict[str, Any]]:
    """Collect, train and evaluate, into ``config.out``, and return the rows of metrics.jsonl, one an epoch."""
    env = make_env(config.env)
    held_out = collect(env, config.held_out_steps, config.seed + 1, config.length)
    if not held_out.valid[:, config.context :].any():
        longest = int(held_out.valid.sum(1).max())
        raise ValueError(f"context={config.context} must be below {longest}, the longest held-out trajectory")
    out = new_folder(config.out)
    data = collect(env, config.steps, config.seed, config.length)
    trainer, rows = new_trainer(config, data), []
    print(f"{int(data.valid.sum())} steps in {len(data.valid)} trajectories of {config.env}", flush=True)
    for row in train(trainer, config, data, held_out):
        rows.append(row)
        append_record(out, row)
        print(
            f"epoch {row['epoch']}/{config.epochs} loss {row['train_loss']:.4f} open-loop error "
            f"{row['error/model']:.3f} (mean {row['error/mean']:.3f}, last value {row['error/last_value']:.3f}) "
            f"overflows {row['overflow_steps']} scale {row['loss_scale']:g} {row['effective_dtype']} "
            f"{row['seconds']:.1f} s",
            flush=True,
        )
    trainer.save_checkpoint(out / "checkpoint.pt", {"config": asdict(config), "sizes": trainer.module.sizes})
    print(out / "checkpoint.pt")
    return rows


def main() -> None:
    """Run the command line; an error ends the process with one line and code 1."""
    config, _ = parse_config(WorldModelConfig, PROGRAM, __doc__.splitlines()[0])
    try:
        run(config)
    except (ValueError, LossScaleError, FloatingPointError) as error:
        sys.exit(f"{PROGRAM}: {error}")


if __name__ == "__main__":
    main()
