"""A recurrent world model of what an environment does, trained in 16 bits.

    python -m recipes.amp.world_model --env Pendulum-v1 --out /tmp/world                 fp16 on a GPU, fp32 on a CPU
    python -m recipes.amp.world_model --env Pendulum-v1 --out /tmp/world --device cpu    fp16 on a CPU too, slowly

``h[t+1] = GRU(h[t], [z[t], a[t]])`` with ``z[t]`` the encoded observation, and a learned vector in its place where
none is seen. From ``h[t+1]`` three heads read the next observation, the reward and whether the episode ended. A
trajectory's first ``context`` observations are seen, what follows is predicted from the actions alone. OUT gets
metrics.jsonl, predictions.png and checkpoint.pt, from which :meth:`WorldModel.load` makes a model that predicts.
"""

import difflib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

import gymnasium
import numpy as np
import torch
from gymnasium.spaces.utils import flatdim, flatten
from torch import nn
from torch.nn import functional as F

from recipes.amp import options
from recipes.amp.checkpoint import InvalidCheckpointError, read_checkpoint
from recipes.amp.options import option
from recipes.amp.trainer import FP16Trainer
from recipes.amp.trainer_config import FP16TrainingConfig
from verl.utils.precision import LossScaleError, to_dtype

CONTEXT = 10  # observations seen where nobody says otherwise
DRAWN = 3, 4  # trajectories and components of the observation that the picture has at most


@dataclass(frozen=True)
class WorldModelConfig:
    """What to learn, and how.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """

    env: str = option("Pendulum-v1", "a Gymnasium environment")
    out: str = option("", "folder for the results, a new one")
    seed: int = option(0, "of the environment, the policy, the weights and the batches")
    device: str = option("auto", "auto, cpu or cuda; 16 bits on a CPU where cpu is asked for by name")
    dtype: str = option("float16", "float16, bfloat16 or float32")
    steps: int = option(40000, "of the environment, to learn from")
    held_out_steps: int = option(4000, "of the environment, to judge by")
    length: int = option(50, "steps of a trajectory at most; a longer episode makes several")
    context: int = option(CONTEXT, "observations that are seen before the model predicts alone")
    hidden: int = option(128, "size of the recurrent state and of the hidden layers")
    latent: int = option(32, "size of an encoded observation")
    epochs: int = option(30, "passes over the trajectories")
    batch_size: int = option(16, "trajectories a step")
    lr: float = option(4e-3, "of Adam in the first epoch; it falls linearly towards 0")
    loss_scale: float = option(65536.0, "the first one, in float16")

    def __post_init__(self):
        to_dtype(self.dtype, "dtype")
        whole = ("steps", "held_out_steps", "hidden", "latent", "epochs", "batch_size")
        rules = {name: (getattr(self, name) >= 1, "at least 1") for name in whole}
        rules["out"] = (bool(self.out), "a folder: --out DIR")
        rules["seed"] = (0 <= self.seed < 2**31, "from 0 to 2147483647")
        rules["length"] = (self.length >= 2, "at least 2")
        rules["context"] = (1 <= self.context < self.length, f"at least 1 and below length={self.length}")
        rules["lr"] = (0 < self.lr < math.inf, "positive")
        options.within(self, rules)
        self.trainer  # noqa: B018

    @property
    def trainer(self) -> FP16TrainingConfig:
        return FP16TrainingConfig(dtype=self.dtype, on_cpu=options.device(self.device)[1], loss_scale=self.loss_scale)


def make_env(name: str, make: Callable[..., Any] = gymnasium.make, **settings: Any) -> Any:
    """``gymnasium.make`` or ``gymnasium.make_vec``, whose errors are one line.

    Raises:
        ValueError: there is no such environment, or a package that it needs is missing.
    """
    module, colon, rest = name.rpartition(":")
    if colon and not (all(part.isidentifier() for part in module.split(".")) and rest):
        raise ValueError(f"env={name} must be NAME or MODULE:NAME")
    try:
        return make(name, **settings)
    except gymnasium.error.UnregisteredEnv:
        near = difflib.get_close_matches(name, gymnasium.registry, cutoff=0.7)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise ValueError(f"env={name} is unknown to Gymnasium{hint}") from None
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"env={name} cannot be made: {' '.join(str(error).split())}") from None


class Trajectories(NamedTuple):
    """N stretches of episodes, T steps each at most; after its end a stretch is zero and not ``valid``."""

    observations: torch.Tensor  # (N, T + 1, O), the last is where the last action led
    actions: torch.Tensor  # (N, T, A), a discrete one as one-hot
    rewards: torch.Tensor  # (N, T)
    ends: torch.Tensor  # (N, T), 1 where the environment terminated; a time limit does not
    valid: torch.Tensor  # (N, T), 1 where there is a step

    def at(self, rows: torch.Tensor) -> "Trajectories":
        return Trajectories(*(each[rows] for each in self))

    def to(self, device: torch.device) -> "Trajectories":
        return Trajectories(*(each.to(device) for each in self))


class Prediction(NamedTuple):
    """What follows each action."""

    observations: torch.Tensor  # (N, T, O)
    rewards: torch.Tensor  # (N, T)
    ends: torch.Tensor  # (N, T), logits from forward, probabilities from predict


def flat(space: gymnasium.Space, value: Any, where: str) -> np.ndarray:
    """An element of a space as a vector.

    Raises:
        ValueError: it has an inf or a NaN; the message begins with ``where`` and names the first component.
    """
    vector = np.asarray(flatten(space, value), dtype=np.float32).reshape(-1)
    bad = np.flatnonzero(~np.isfinite(vector))
    if len(bad):
        raise ValueError(f"{where}: component {bad[0]} of the observation is {vector[bad[0]]}")
    return vector


def collect(
    env: str | gymnasium.Env,
    steps: int,
    seed: int,
    length: int = 50,
    policy: Optional[Callable[[Any], Any]] = None,
) -> Trajectories:
    """Act in an environment for ``steps`` steps, in episodes from the resets that ``seed`` gives.

    Args:
        env: a Gymnasium environment, or its name; spaces other than boxes are flattened as Gymnasium does.
        length: T; a longer episode goes on in the next trajectory.
        policy: observation -> action; ``None`` samples the action space.

    Raises:
        ValueError: an unknown environment; an observation or a reward that is inf or NaN, by its step and component.
    """
    env = make_env(env) if isinstance(env, str) else env
    name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    env.action_space.seed(seed)
    space, actions = env.observation_space, env.action_space
    policy = policy or (lambda observation: actions.sample())
    found: list[list[tuple]] = []
    observation, ended = None, True
    for step in range(steps):
        if ended:
            observation, _ = env.reset(seed=seed if step == 0 else None)
        before = flat(space, observation, f"env={name}, step {step}")
        if ended or len(found[-1]) == length:
            found.append([])
        action = policy(observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        after = flat(space, observation, f"env={name}, step {step + 1}")
        if not math.isfinite(reward):
            raise ValueError(f"env={name}, step {step + 1}: the reward is {reward}")
        found[-1].append((before, flatten(actions, action), reward, terminated, after))
        ended = terminated or truncated
    env.close()
    shape = len(found), length
    made = Trajectories(
        torch.zeros(len(found), length + 1, flatdim(space)),
        torch.zeros(*shape, flatdim(actions)),
        *(torch.zeros(shape) for _ in range(3)),
    )
    for row, taken in enumerate(found):
        before, action, reward, terminated, after = map(np.stack, zip(*taken, strict=True))
        made.observations[row, : len(taken)] = torch.from_numpy(before)
        made.observations[row, len(taken)] = torch.from_numpy(after[-1])
        for tensor, values in zip(made[1:4], (action, reward, terminated), strict=True):
            tensor[row, : len(taken)] = torch.from_numpy(values.astype(np.float32))
        made.valid[row, : len(taken)] = 1.0
    return made


class WorldModel(nn.Module):
    """Encoder, GRU and three heads; it sees and predicts observations and rewards in the environment's own units.

    Args:
        observation_size: O.
        action_size: A.
        hidden: size of the recurrent state and of each head's hidden layer.
        latent: size of an encoded observation.
    """

    def __init__(self, observation_size: int, action_size: int, hidden: int = 128, latent: int = 32):
        super().__init__()
        self.sizes = {"observation_size": observation_size, "action_size": action_size}
        self.sizes |= {"hidden": hidden, "latent": latent}
        self.encoder = nn.Sequential(nn.Linear(observation_size, hidden), nn.SiLU(), nn.Linear(hidden, latent))
        self.unseen = nn.Parameter(torch.zeros(latent))
        self.dynamics = nn.GRU(latent + action_size, hidden, batch_first=True)
        outputs = {"observation": observation_size, "reward": 1, "end": 1}
        self.heads = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, size))
                for name, size in outputs.items()
            }
        )
        for name, size in (("observation", observation_size), ("action", action_size), ("reward", 1)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))

    def set_statistics(self, data: Trajectories) -> None:
        """Normalise by the mean and the standard deviation of these trajectories; what never changes is not scaled."""
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
        """Normalised predictions in fp32, end as logits.

        Args:
            observations: (N, at least context, O); those from ``context`` on are not looked at.
            actions: (N, T, A), T at least ``context``.
        """
        seen = self.encoder((observations[:, :context] - self.observation_mean) / self.observation_std)
        unseen = self.unseen.to(seen.dtype).expand(len(actions), actions.shape[1] - context, -1)
        taken = (actions - self.action_mean) / self.action_std
        states, _ = self.dynamics(torch.cat([torch.cat([seen, unseen], 1), taken.to(seen.dtype)], -1))
        observation, reward, end = (head(states).float() for head in self.heads.values())
        return Prediction(observation, reward.squeeze(-1), end.squeeze(-1))

    @torch.no_grad()
    def predict(self, observations: torch.Tensor, actions: torch.Tensor, context: int) -> Prediction:
        """What follows each action, in the environment's units, ends as probabilities.

        Args:
            observations: (N, at least context, O); the first ``context`` are seen.
            actions: (N, T, A).

        Raises:
            ValueError: ``context`` is below 1 or beyond what is given.
        """
        given = min(observations.shape[1], actions.shape[1])
        if not 1 <= context <= given:
            raise ValueError(f"context={context} must be at least 1 and at most the {given} steps given")
        observation, reward, end = self(observations, actions, context)
        return Prediction(
            observation * self.observation_std + self.observation_mean,
            reward * self.reward_std + self.reward_mean,
            end.sigmoid(),
        )

    @classmethod
    def load(cls, path: str | Path) -> "WorldModel":
        """The model of a checkpoint of this recipe, on the CPU.

        Raises:
            FileNotFoundError: there is no such file.
            InvalidCheckpointError: truncated, of another model, or from a newer version.
        """
        saved = read_checkpoint(path)
        if "sizes" not in saved["extra"]:
            raise InvalidCheckpointError(f"{path}: no checkpoint of a world model")
        model = cls(**saved["extra"]["sizes"])
        model.load_state_dict(saved["model"])
        return model


def mean_over(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The mean of values (N, T) by weights (N, T); 0 where all of them are 0."""
    return (values * weights).sum() / weights.sum().clamp(min=1.0)


def world_model_loss(model: nn.Module, batch: Trajectories, context: int = CONTEXT) -> torch.Tensor:
    """One-step error of the steps that are seen, plus open-loop error of those after them; 0-d, in fp32.

    An error is squared, in standard deviations, of observation (mean of its components) and reward, plus the cross
    entropy of the end.
    """
    predicted = model(batch.observations, batch.actions, context)
    owner = model.module if hasattr(model, "module") else model
    with torch.autocast(batch.rewards.device.type, enabled=False):
        observations = (batch.observations[:, 1:] - owner.observation_mean) / owner.observation_std
        rewards = (batch.rewards - owner.reward_mean) / owner.reward_std
        error = (predicted.observations - observations).square().mean(-1) + (predicted.rewards - rewards).square()
        error = error + F.binary_cross_entropy_with_logits(predicted.ends, batch.ends, reduction="none")
        parts = slice(None, context), slice(context, None)
        return sum(mean_over(error[:, part], batch.valid[:, part]) for part in parts)


def open_loop_errors(model: WorldModel, data: Trajectories, context: int) -> dict[str, float]:
    """Root mean square errors after the context, in standard deviations of what the model learned from.

    ``model`` is the observation's and ``reward`` the reward's; ``mean`` is the observation's where its mean is
    predicted, ``last_value`` where the last one seen is.
    """
    predicted = model.predict(data.observations, data.actions, context)
    true, last = data.observations[:, 1:], data.observations[:, context - 1 : context].expand_as(predicted.observations)
    valid = data.valid[:, context:]

    def error(guess: torch.Tensor) -> float:
        squared = ((guess - true) / model.observation_std).square().mean(-1)
        return mean_over(squared[:, context:], valid).sqrt().item()

    rewards = ((predicted.rewards - data.rewards) / model.reward_std).square()[:, context:]
    return {
        "model": error(predicted.observations),
        "mean": error(model.observation_mean.expand_as(true)),
        "last_value": error(last),
        "reward": mean_over(rewards, valid).sqrt().item(),
    }


def train(
    config: WorldModelConfig, data: Trajectories, held_out: Trajectories
) -> tuple[FP16Trainer, Iterable[dict[str, Any]]]:
    """A trainer, and one row of metrics an epoch as it trains; the held-out data is judged in its dtype too."""
    torch.manual_seed(config.seed)
    model = WorldModel(data.observations.shape[-1], data.actions.shape[-1], config.hidden, config.latent)
    model.set_statistics(data)
    device, _ = options.device(config.device)
    model.to(device)
    data, held_out = data.to(device), held_out.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    trainer = FP16Trainer(model, optimizer, config.trainer)
    order = torch.Generator().manual_seed(config.seed)

    def epochs() -> Iterable[dict[str, Any]]:
        for epoch in range(1, config.epochs + 1):
            began, before = time.perf_counter(), trainer.overflow_steps
            for group in optimizer.param_groups:
                group["lr"] = config.lr * (1 - (epoch - 1) / config.epochs)
            losses = [
                trainer.training_step(
                    data.at(rows.to(device)), lambda model, batch: world_model_loss(model, batch, config.context)
                )
                for rows in torch.randperm(len(data.rewards), generator=order).split(config.batch_size)
            ]
            with trainer.autocast():
                errors = open_loop_errors(model, held_out, config.context)
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

    return trainer, epochs()


def draw(model: WorldModel, data: Trajectories, context: int, rows: list[dict[str, Any]], title: str, path: Path):
    """True and predicted observations of the longest held-out trajectories, and below them how it was learned."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = data.valid.sum(1).argsort(descending=True, stable=True)[: DRAWN[0]]
    some = data.at(chosen)
    predicted = model.predict(some.observations, some.actions, context).observations
    components = min(some.observations.shape[-1], DRAWN[1])
    figure = plt.figure(figsize=(4.2 * len(chosen), 1.7 * components + 2.8), layout="constrained")
    figure.suptitle(title)
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.7 * components, 2.8])
    panels = top.subplots(components, len(chosen), sharex=True, sharey="row", squeeze=False)
    for column in range(len(chosen)):
        steps = int(some.valid[column].sum())
        for component in range(components):
            panel = panels[component][column]
            panel.plot(some.observations[column, : steps + 1, component], "k", lw=1, label="true")
            panel.plot(range(1, steps + 1), predicted[column, :steps, component], "C1--", label="predicted")
            panel.axvline(context - 1, color="grey", ls=":", label="last one seen")
        panels[0][column].set_title(f"held-out trajectory {chosen[column]}", fontsize=9)
        panels[-1][column].set_xlabel("step")
    for component in range(components):
        panels[component][0].set_ylabel(f"observation {component}")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=3, fontsize=8)
    loss, error, overflow = bottom.subplots(1, 3)
    epochs = [row["epoch"] for row in rows]
    loss.plot(epochs, [row["train_loss"] for row in rows])
    loss.set(title="training loss", xlabel="epoch", yscale="log")
    for name, style in (("model", "C1-"), ("last_value", "C2:"), ("mean", "C3:")):
        error.plot(epochs, [row[f"error/{name}"] for row in rows], style, label=name.replace("_", " "))
    error.set(title="held-out open-loop error (std)", xlabel="epoch", ylim=(0, None))
    error.legend(fontsize=7)
    counts = [row["overflow_steps"] for row in rows]
    overflow.bar(epochs, counts, color="C3")
    overflow.set(title=f"overflows ({rows[-1]['effective_dtype']})", xlabel="epoch", ylim=(0, 1.1 * max(1, *counts)))
    for axis in (loss.xaxis, error.xaxis, overflow.xaxis, overflow.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def run(config: WorldModelConfig) -> list[dict[str, Any]]:
    """Collect, train, judge and draw; everything goes to ``config.out``.

    Returns:
        the rows of metrics.jsonl, one an epoch.

    Raises:
        ValueError: an environment that cannot be learned from, a folder with results.
        LossScaleError, FloatingPointError: as the trainer's.
    """
    held_out = collect(config.env, config.held_out_steps, config.seed + 1, config.length)
    if not held_out.valid[:, config.context :].any():
        longest = int(held_out.valid.sum(1).max())
        raise ValueError(f"context={config.context} must be below {longest}, the longest held-out trajectory")
    out = options.new_folder(config.out)
    data = collect(config.env, config.steps, config.seed, config.length)
    trainer, epochs = train(config, data, held_out)
    print(f"{int(data.valid.sum())} steps in {len(data.valid)} trajectories of {config.env}", flush=True)
    rows = []
    with (out / "metrics.jsonl").open("w") as file:
        for row in epochs:
            rows.append(row)
            file.write(json.dumps(options.finite(row), allow_nan=False) + "\n")
            file.flush()
            print(
                f"epoch {row['epoch']}/{config.epochs} loss {row['train_loss']:.4f} open-loop error "
                f"{row['error/model']:.3f} (mean {row['error/mean']:.3f}, last value {row['error/last_value']:.3f}) "
                f"overflows {row['overflow_steps']} scale {row['loss_scale']:g} {row['effective_dtype']} "
                f"{row['seconds']:.1f} s",
                flush=True,
            )
    model = trainer.module
    trainer.save_checkpoint(out / "checkpoint.pt", {"config": asdict(config), "sizes": model.sizes})
    title = f"{config.env}, trained in {rows[-1]['effective_dtype']}, {config.context} observations seen"
    draw(model.cpu(), held_out, config.context, rows, title, out / "predictions.png")
    print(f"{out / 'metrics.jsonl'}, {out / 'predictions.png'}, {out / 'checkpoint.pt'}")
    return rows


def main() -> None:
    config, _ = options.parse(WorldModelConfig, "recipes.amp.world_model", __doc__.split("\n")[0])
    try:
        run(config)
    except (ValueError, LossScaleError, FloatingPointError) as error:
        sys.exit(f"recipes.amp.world_model: {error}")


if __name__ == "__main__":
    main()
