"""PPO on Gymnasium's vector environments, in fp32 or with autocast to 16 bits.

    python -m recipes.amp.ppo --env CartPole-v1 --out DIR                                   float32
    python -m recipes.amp.ppo --env CartPole-v1 --use-amp --out DIR                         float16, on a GPU
    python -m recipes.amp.ppo --env CartPole-v1 --use-amp --device cpu --out DIR            float16, on a CPU

AMP is off unless asked for; ``DISABLE_AMP=1`` in the environment turns it off whatever is asked for. Rollout and update
run the same networks in the same dtype, each in an autocast region of its own, so that the ratio of new to old
probabilities starts at 1. What follows the networks (softmax, ratio, losses, advantages) is fp32. Updates are
:class:`recipes.amp.trainer.FP16Trainer`'s.

DIR gets ``metrics.jsonl`` and TensorBoard's events (one record an update, the same names), ``checkpoint.pt`` and
``curves.png``. Interrupted, the same command with ``--resume`` goes on.

Schulman et al. 2017, arXiv 1707.06347; generalised advantages: Schulman et al. 2016, arXiv 1506.02438.
"""

import json
import math
import platform
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Optional

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.spaces.utils import flatdim
from torch.utils.tensorboard import SummaryWriter

from recipes.amp.checkpoint import read_checkpoint
from recipes.amp.options import device, finite, flag, new_folder, option, parse, within
from recipes.amp.trainer import FP16Trainer
from recipes.amp.trainer_config import FP16TrainingConfig
from recipes.amp.world_model.model import make_env
from verl.utils.precision import LossScaleError, dtype_name

PROGRAM, KILL_SWITCH = "recipes.amp.ppo", "DISABLE_AMP"
NATIVE = ("CartPole-v0", "CartPole-v1")  # their vector environments are tested to be the same as single ones
WINDOW = 100  # episodes of return_mean
CHECKPOINT, METRICS, CURVES, EVALUATION = "checkpoint.pt", "metrics.jsonl", "curves.png", "evaluation.json"
PROGRESS = ("device", "updates", "episodes", "returns", "generator")  # of a run, in a checkpoint
MAY_CHANGE = ("out", "resume", "total_steps", "stop_at", "eval_episodes", "save_every")
MAY_CHANGE += ("device", "compile", "use_amp", "dtype", "loss_scale", "vectorize")


class Refused(ValueError):
    """What PPO cannot run, or go on with; the message is one line."""


@dataclass(frozen=True)
class PPOConfig:
    """All that a run depends on; every field is an option of the command line.

    Raises:
        ValueError: naming the key, its value and what is allowed; a malformed ``DISABLE_AMP``.
    """

    env: str = option("CartPole-v1", "Gymnasium's name of it, or module:name; Discrete or MultiDiscrete actions")
    out: Optional[str] = option(None, "folder for metrics, checkpoint and figure; new, or --resume")
    use_amp: bool = option(False, f"autocast to --dtype; {KILL_SWITCH}=1 in the environment overrules it")
    dtype: str = option("float16", "with --use-amp: float16 or bfloat16")
    device: str = option("auto", "auto, cpu or cuda; 16 bits on a CPU need an explicit cpu")
    compile: bool = option(False, "torch.compile the networks")
    seed: int = option(1, "of weights, actions, minibatches and environments")
    total_steps: int = option(150_000, "steps of all environments together, in whole updates of num_envs * num_steps")
    stop_at: Optional[float] = option(None, f"end when the mean return of the last {WINDOW} episodes reaches this")
    eval_episodes: int = option(100, "episodes with the most probable actions, after training")
    save_every: int = option(50, "updates between checkpoints; one at the end always")
    resume: bool = option(False, "go on from --out's checkpoint; the environments start anew")
    num_envs: int = option(32, "environments side by side")
    vectorize: str = option("auto", "native (CartPole), sync, async (a process each); auto: native, or else sync")
    num_steps: int = option(64, "steps of each environment between updates")
    minibatches: int = option(4, "an epoch")
    epochs: int = option(10, "over each batch")
    hidden: int = option(64, "width of the hidden layers")
    layers: int = option(2, "hidden layers, of the policy and of the value each")
    learning_rate: float = option(1e-3, "of Adam, at first")
    anneal: bool = option(True, "learning rate falls linearly to 0 over total_steps")
    gamma: float = option(0.98, "discount a step")
    gae_lambda: float = option(0.9, "of generalised advantages")
    clip: float = option(0.2, "largest change of a probability's ratio that is rewarded")
    entropy_coefficient: float = option(0.0, "of the entropy in the objective")
    value_coefficient: float = option(0.5, "of the value loss")
    max_grad_norm: float = option(0.5, "clip the unscaled gradients to this L2 norm")
    loss_scale: float = option(65536.0, "first loss scale, in float16")

    def __post_init__(self):
        batch, each = self.num_envs * self.num_steps, "between 0 and 1"
        counts = ("num_envs", "minibatches", "epochs", "hidden", "layers", "save_every")
        within(
            self,
            {
                "dtype": (self.dtype in ("float16", "bfloat16"), "float16 or bfloat16; float32 is without --use-amp"),
                "vectorize": (self.vectorize in ("auto", "native", "sync", "async"), "auto, native, sync or async"),
                "seed": (0 <= self.seed < 2**32, "at least 0 and below 2**32"),
                **{key: (getattr(self, key) >= 1, "at least 1") for key in counts},
                "num_steps": (self.num_steps >= 2, "at least 2: the step after an episode's last is a reset"),
                "total_steps": (self.total_steps >= batch, f"at least num_envs * num_steps = {batch}"),
                "stop_at": (self.stop_at is None or math.isfinite(self.stop_at), "a finite number"),
                "eval_episodes": (self.eval_episodes >= 0, "at least 0"),
                "learning_rate": (0 < self.learning_rate < math.inf, "positive"),
                "gamma": (0 <= self.gamma <= 1, each),
                "gae_lambda": (0 <= self.gae_lambda <= 1, each),
                "clip": (0 < self.clip < 1, each),
                "entropy_coefficient": (0 <= self.entropy_coefficient < math.inf, "at least 0"),
                "value_coefficient": (0 < self.value_coefficient < math.inf, "positive"),
                "resume": (self.out is not None or not self.resume, "left out without --out"),
            },
        )
        parts = f"a divisor of num_envs * num_steps = {batch} into parts of at least 4"
        within(self, {"minibatches": (batch % self.minibatches == 0 and batch // self.minibatches >= 4, parts)})
        self.training(False)
        device(self.device)
        flag(KILL_SWITCH)

    @property
    def updates(self) -> int:
        """Of a batch of num_envs * num_steps each."""
        return self.total_steps // (self.num_envs * self.num_steps)

    def training(self, amp: bool) -> FP16TrainingConfig:
        return FP16TrainingConfig(
            enabled=amp,
            dtype=self.dtype,
            on_cpu=device(self.device)[1],
            loss_scale=self.loss_scale,
            max_grad_norm=self.max_grad_norm,
        )


class State(NamedTuple):
    """What the N environments show before a step."""

    observations: torch.Tensor  # (N, inputs), fp32, flat; of a Discrete space one-hot
    allowed: torch.Tensor  # (N, sum of factors), bool: info's action_mask, all where there is none


class Environments:
    """A vector environment as PPO sees it, checked; the step after an episode's last is a reset (NEXT_STEP).

    That mode, because Gymnasium's native vector environments know no other, and because the observation that an episode
    came to is then one of the rollout's own: to bootstrap from it takes no forward of its own.

    Args:
        env: Gymnasium's name, or ``module:name``.
        number: of environments, N.
        vectorize: native, sync, async or auto.
        device: where tensors go.

    Raises:
        ValueError: the environment is unknown, cannot be made, or has spaces that PPO has no networks for.
    """

    largest = torch.finfo(torch.float32).max  # observation that the networks can take

    def __init__(self, env: str, number: int, vectorize: str, device: torch.device):
        self.env, self.number, self.device, self.step_number = env, number, device, 0
        self.mode = ("native" if env in NATIVE else "sync") if vectorize == "auto" else vectorize
        if self.mode == "native" and env not in NATIVE:
            raise Refused(f"vectorize=native must be auto, sync or async with env={env}: native is CartPole alone")
        reset = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        how, reset = ("vector_entry_point", {}) if self.mode == "native" else (self.mode, reset)
        self.vector = make_env(env, gymnasium.make_vec, num_envs=number, vectorization_mode=how, vector_kwargs=reset)
        self.observed, self.acted = self.vector.single_observation_space, self.vector.single_action_space
        if not isinstance(self.observed, Box | Discrete):
            raise Refused(f"env={env}: observations are {self.observed}, must be Box or Discrete")
        if not isinstance(self.acted, Discrete | MultiDiscrete):
            raise Refused(f"env={env}: actions are {self.acted}, must be Discrete or MultiDiscrete")
        self.inputs = flatdim(self.observed)
        choices = self.acted.n if isinstance(self.acted, Discrete) else self.acted.nvec.ravel()
        self.factors = [int(n) for n in np.atleast_1d(choices)]

    def reset(self, seed: int) -> State:
        return self._state(*self.vector.reset(seed=seed))

    def step(self, actions: torch.Tensor) -> tuple[State, np.ndarray, np.ndarray, np.ndarray]:
        """Take actions (N, factors) -> the next state; rewards, terminated and truncated, (N,) each.

        Raises:
            Refused: an observation or a reward that is not finite, an action mask without an action.
        """
        taken = actions.cpu().numpy().reshape(self.number, *self.acted.shape) + self.acted.start
        observations, rewards, terminated, truncated, infos = self.vector.step(taken)
        self.step_number += 1
        self._check("reward", rewards, np.isfinite(rewards), "finite")
        return self._state(observations, infos), rewards, terminated, truncated

    def _state(self, observations: np.ndarray, infos: Mapping[str, Any]) -> State:
        if isinstance(self.observed, Discrete):
            flat = np.eye(self.inputs, dtype=np.float32)[observations - self.observed.start]
        else:
            flat = np.asarray(observations, dtype=np.float32).reshape(self.number, self.inputs)
        fits = np.abs(flat) <= self.largest  # false of NaN
        self._check("observation", flat, fits, f"finite and at most {self.largest:.5g}")
        allowed = np.ones((self.number, sum(self.factors)), dtype=bool)
        if "action_mask" in infos:
            if not isinstance(self.acted, Discrete):
                raise Refused(f"env={self.env}: an action_mask goes with Discrete actions, these are {self.acted}")
            allowed = np.asarray(infos["action_mask"]).astype(bool) | ~infos["_action_mask"][:, None]
            self._check("number of actions that action_mask allows", allowed.sum(-1), allowed.any(-1), "1 at least")
        return State(torch.from_numpy(flat).to(self.device), torch.from_numpy(allowed).to(self.device))

    def _check(self, what: str, values: np.ndarray, good: np.ndarray, allowed: str) -> None:
        if not good.all():
            index, *place = np.argwhere(~good)[0].tolist()
            raise Refused(
                f"env={self.env}: {what}{place or ''} of environment {index} (of {self.number}) at step "
                f"{self.step_number} is {values[(index, *place)]}: must be {allowed}"
            )


class Agent(torch.nn.Module):
    """A policy with a head for each factor of the action, and a value; nothing is shared. Orthogonal first weights.

    Args:
        inputs: size of a flat observation.
        factors: how many choices each factor of an action has; a Discrete action is one factor.
    """

    def __init__(self, inputs: int, factors: Sequence[int], hidden: int, layers: int, generator: torch.Generator):
        super().__init__()

        def linear(inputs: int, outputs: int, gain: float) -> torch.nn.Linear:
            layer = torch.nn.Linear(inputs, outputs)
            torch.nn.init.orthogonal_(layer.weight, gain, generator)
            torch.nn.init.zeros_(layer.bias)
            return layer

        def body() -> torch.nn.Sequential:
            sizes = pairwise([inputs] + [hidden] * layers)
            return torch.nn.Sequential(*(m for a, b in sizes for m in (linear(a, b, 2**0.5), torch.nn.Tanh())))

        self.policy, self.value = body(), body()
        self.policy_heads = torch.nn.ModuleList(linear(hidden, choices, 0.01) for choices in factors)
        self.value_head = linear(hidden, 1, 1.0)

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """observations (N, inputs) -> logits (N, sum of factors) and values (N,), both fp32."""
        features = self.policy(observations)
        logits = torch.cat([head(features) for head in self.policy_heads], -1)
        return logits.float(), self.value_head(self.value(observations)).squeeze(-1).float()


def log_softmax(logits: torch.Tensor, allowed: torch.Tensor, factors: Sequence[int]) -> list[torch.Tensor]:
    """Log-probabilities (N, choices), fp32, of each factor's choices; those that are not allowed have probability 0.

    Their logits become fp32's least: a finite number, so that entropy and gradients stay finite.

    Args:
        logits: (N, sum of factors), fp32.
        allowed: the same shape, bool; at least one choice of each factor.
    """
    assert logits.dtype == torch.float32, logits.dtype
    masked = logits.masked_fill(~allowed, torch.finfo(torch.float32).min)
    return [part.log_softmax(-1) for part in masked.split(list(factors), -1)]


def joint(log_probs: Sequence[torch.Tensor], actions: torch.Tensor) -> torch.Tensor:
    """Log-probability (N,) of whole actions (N, factors): the sum over factors."""
    chosen = (each.gather(-1, action) for each, action in zip(log_probs, actions.split(1, -1), strict=True))
    return sum(chosen).squeeze(-1)


def generalised_advantages(
    rewards: torch.Tensor, values: torch.Tensor, terminated: torch.Tensor, ended: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Advantages (T, N), fp32; those of steps that reset mean nothing.

    An episode that terminated is worth 0 from there on; one that was cut off, or that the rollout ends in, what the
    value network says of the observation it came to.

    Args:
        rewards: (T, N).
        values: (T + 1, N), of each step's observation and of the last that was seen.
        terminated: (T, N), bool.
        ended: (T, N), bool: terminated or truncated.
    """
    deltas = rewards + gamma * values[1:] * ~terminated - values[:-1]
    advantages = torch.empty_like(deltas)
    following = torch.zeros_like(deltas[0])
    for step in reversed(range(len(deltas))):
        following = deltas[step] + gamma * lam * ~ended[step] * following
        advantages[step] = following
    return advantages


class Batch(NamedTuple):
    """Steps of a rollout without those that reset, of B rows; floats are fp32."""

    observations: torch.Tensor  # (B, inputs)
    allowed: torch.Tensor  # (B, sum of factors), bool
    actions: torch.Tensor  # (B, factors), int64
    log_probs: torch.Tensor  # (B,), of the policy that acted
    advantages: torch.Tensor  # (B,), of mean 0 and variance 1
    returns: torch.Tensor  # (B,)


def ppo_loss(
    logits: torch.Tensor, values: torch.Tensor, batch: Batch, factors: Sequence[int], config: PPOConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped loss, 0-d, fp32, and what to log of it."""
    log_probs = log_softmax(logits, batch.allowed, factors)
    difference = joint(log_probs, batch.actions) - batch.log_probs
    ratio = difference.exp()
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    policy_loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()
    value_loss = (values - batch.returns).square().mean()
    entropy = -sum((each.exp() * each).sum(-1) for each in log_probs).mean()
    loss = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
    with torch.no_grad():
        seen = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": (ratio - 1 - difference).mean(),
            "clip_fraction": (ratio != clipped).float().mean(),
            "ratio_deviation": (ratio - 1).abs().mean(),
        }
    return loss, seen


class PPO:
    """One run: networks, environments, and how far it has come. It writes nothing by itself.

    Args:
        sources: who set each field of ``config``, as :func:`recipes.amp.options.parse` gives it.

    Raises:
        ValueError: as :class:`Environments`.
    """

    def __init__(self, config: PPOConfig, sources: Optional[Mapping[str, str]] = None):
        self.config, self.sources = config, dict(sources or {})
        self.device, _ = device(config.device)
        self.envs = Environments(config.env, config.num_envs, config.vectorize, self.device)
        np.random.seed(config.seed)  # for environments that draw from it
        first = torch.Generator().manual_seed(config.seed)
        self.agent = Agent(self.envs.inputs, self.envs.factors, config.hidden, config.layers, first).to(self.device)
        optimizer = torch.optim.Adam(self.agent.parameters(), lr=config.learning_rate, eps=1e-5, fused=True)
        killed = flag(KILL_SWITCH) is True
        self.amp_source = f"environment ({KILL_SWITCH})" if killed else self.sources.get("use_amp", "default")
        self.trainer = FP16Trainer(self.agent, optimizer, config.training(config.use_amp and not killed))
        self.envs.largest = torch.finfo(self.trainer.precision.compute).max
        if config.compile:
            self.agent.compile()
        self.generator = torch.Generator(self.device).manual_seed(config.seed)  # of actions and minibatches
        self.updates = self.episodes = 0
        self.returns: deque[float] = deque(maxlen=WINDOW)
        self._seen: list[dict[str, torch.Tensor]] = []
        self._start()

    def _start(self) -> None:
        """Start the environments, from other states each time that the run goes on."""
        seed = np.random.SeedSequence((self.config.seed, self.updates)).generate_state(1)
        self._state = self.envs.reset(int(seed[0]))
        self._resets = np.zeros(self.config.num_envs, dtype=bool)  # whether the next step is one
        self._return_so_far = np.zeros(self.config.num_envs)

    @property
    def steps(self) -> int:
        """Of all environments together, resets included."""
        return self.updates * self.config.num_envs * self.config.num_steps

    def collect(self) -> Batch:
        """Act for num_steps steps of every environment, in the dtype that the update trains in.

        Raises:
            Refused: as :meth:`Environments.step`.
        """
        factors, seen = self.envs.factors, []
        # A region of its own, in which weights are cast once; the dtype that is reported is observed in the update's.
        with torch.no_grad(), self.trainer.precision.autocast(self.device.type):
            for _ in range(self.config.num_steps):
                state = self._state
                logits, values = self.agent(state.observations)
                log_probs = log_softmax(logits, state.allowed, factors)
                actions = torch.cat([p.exp().multinomial(1, generator=self.generator) for p in log_probs], -1)
                self._state, rewards, terminated, truncated = self.envs.step(actions)
                ended = terminated | truncated
                shown = (rewards.astype(np.float32), terminated, ended, ~self._resets)
                seen.append((*state, actions, joint(log_probs, actions), values, *map(torch.from_numpy, shown)))
                self._return_so_far += rewards
                self.returns.extend(self._return_so_far[ended].tolist())
                self.episodes += int(ended.sum())
                self._return_so_far[ended] = 0.0
                self._resets = ended
            _, last = self.agent(self._state.observations)
        *acted, values, rewards, terminated, ended, valid = (
            torch.stack(each).to(self.device) for each in zip(*seen, strict=True)
        )
        advantages = generalised_advantages(
            rewards, torch.cat([values, last[None]]), terminated, ended, self.config.gamma, self.config.gae_lambda
        )
        batch = Batch(*(each[valid] for each in (*acted, advantages, advantages + values)))
        deviation = batch.advantages.std(correction=0) + 1e-8
        return batch._replace(advantages=(batch.advantages - batch.advantages.mean()) / deviation)

    def loss(self, agent: torch.nn.Module, batch: Batch) -> torch.Tensor:
        loss, seen = ppo_loss(*agent(batch.observations), batch, self.envs.factors, self.config)
        self._seen.append(seen)
        return loss

    def learn(self, batch: Batch) -> dict[str, float]:
        """``epochs`` passes over the batch, one update of the trainer a minibatch.

        Returns:
            means over the minibatches; but ``ratio_deviation``, the mean of |ratio - 1|, is the first one's, before any
            step: what dtypes and kernels make of equal weights.

        Raises:
            LossScaleError, FloatingPointError: too many skipped updates in a row.
        """
        config, self._seen = self.config, []
        learning_rate = config.learning_rate * (1 - self.updates / config.updates if config.anneal else 1.0)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = learning_rate
        for _ in range(config.epochs):
            order = torch.randperm(len(batch.actions), generator=self.generator, device=self.device)
            for rows in order.tensor_split(config.minibatches):
                self.trainer.training_step(Batch(*(each[rows] for each in batch)), self.loss)
        means = {name: torch.stack([seen[name] for seen in self._seen]).mean().item() for name in self._seen[0]}
        first = self._seen[0]["ratio_deviation"].item()
        return means | {"ratio_deviation": first, "learning_rate": learning_rate}

    def iterate(self) -> dict[str, Any]:
        """One rollout and the update on it; what happened, ready for a logger.

        Raises:
            Refused, LossScaleError, FloatingPointError: as :meth:`collect` and :meth:`learn`.
        """
        begun = time.perf_counter()
        batch = self.collect()
        collected = time.perf_counter()
        learned = self.learn(batch)
        ended = time.perf_counter()
        self.updates += 1
        return {
            "update": self.updates,
            "steps": self.steps,
            "episodes": self.episodes,
            "return_mean": sum(self.returns) / len(self.returns) if self.returns else None,
            **learned,
            **self.precision(),
            "steps_per_second": self.config.num_envs * self.config.num_steps / (ended - begun),
            "rollout_seconds": collected - begun,
            "update_seconds": ended - collected,
        }

    def precision(self) -> dict[str, Any]:
        """What is computed in which dtype, who decided so, and what overflowed so far.

        ``effective_dtype`` is observed in the first update: ``None`` before.
        """
        stats = self.trainer.get_stats()
        kept = ("effective_dtype", "effective_dtype_share", "fallback", "overflow_steps", "overflow_rate", "grad_norm")
        return {
            "amp_enabled": self.trainer.precision.compute != torch.float32,
            "amp_source": self.amp_source,
            **{name: stats[name] for name in kept},
            "loss_scale": stats["current_scale"],
        }

    def evaluate(self, episodes: int) -> list[float]:
        """Returns of so many episodes, side by side, by the most probable actions, in the dtype of the training.

        Where the environment has no time limit, they are cut off after 10 000 steps.
        """
        config, returns = self.config, np.zeros(episodes)
        envs = Environments(config.env, episodes, self.envs.mode.replace("async", "sync"), self.device)
        envs.largest = self.envs.largest
        state, running = envs.reset(config.seed + 2**31), np.ones(episodes, dtype=bool)
        with torch.no_grad(), self.trainer.precision.autocast(self.device.type):
            for _ in range(envs.vector.spec.max_episode_steps or 10_000):
                log_probs = log_softmax(self.agent(state.observations)[0], state.allowed, envs.factors)
                actions = torch.stack([each.argmax(-1) for each in log_probs], -1)
                state, rewards, terminated, truncated = envs.step(actions)
                returns += rewards * running
                running &= ~(terminated | truncated)
                if not running.any():
                    break
        envs.vector.close()
        return returns.tolist()

    def provenance(self) -> dict[str, Any]:
        """All that made this run what it is, in plain values."""
        spec, root = self.envs.vector.spec, Path(__file__).resolve().parents[3]
        commit = None
        if (root / ".git").exists() and shutil.which("git"):
            asked = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True)
            commit = asked.stdout.strip() or None  # git may refuse another user's checkout
        return {
            "recipe": "ppo",
            "config": asdict(self.config),
            "sources": self.sources,
            "env": {"id": spec.id, "entry_point": str(spec.entry_point), "max_episode_steps": spec.max_episode_steps}
            | {"observations": str(self.envs.observed), "actions": str(self.envs.acted), "mode": self.envs.mode},
            "precision": self.precision(),
            "versions": {"torch": str(torch.__version__), "gymnasium": gymnasium.__version__}
            | {"python": platform.python_version()},
            "commit": commit,
        }

    def save(self, path: Path) -> None:
        """Write a checkpoint that :meth:`load` goes on from."""
        random = self.generator.get_state()
        progress = (self.device.type, self.updates, self.episodes, list(self.returns), random)
        self.trainer.save_checkpoint(path, {**self.provenance(), **dict(zip(PROGRESS, progress, strict=True))})

    def load(self, path: Path) -> str:
        """Go on from a checkpoint: networks, Adam, loss scale, counters and random numbers; environments start anew.

        Returns:
            the dtype that it was trained in.

        Raises:
            Refused: there is none, or it is another recipe's, was made by settings that may not change, or on another
                kind of device.
            InvalidCheckpointError: truncated, from a newer version, or of another model.
        """
        if not path.exists():
            raise Refused(f"{path}: there is no such checkpoint to resume from; leave out --resume")
        saved = read_checkpoint(path)["extra"]
        if saved.get("recipe") != "ppo" or not {"config", "precision", *PROGRESS} <= saved.keys():
            raise Refused(f"{path}: no checkpoint of PPO")
        for key, value in asdict(self.config).items():
            if key not in MAY_CHANGE and saved["config"].get(key) != value:
                raise Refused(f"{path}: made with {key}={saved['config'].get(key)}, not {value}: resume with that")
        made_on, updates, episodes, returns, random = (saved[name] for name in PROGRESS)
        if made_on != self.device.type:  # whose random numbers are others
            raise Refused(f"{path}: made on {made_on}, not {self.device.type}: resume with --device {made_on}")
        self.trainer.load_checkpoint(path)
        self.updates, self.episodes = updates, episodes
        self.returns.extend(returns)
        self.generator.set_state(random.cpu())
        self._start()
        return saved["precision"]["effective_dtype"]


def write(record: Mapping[str, Any], metrics: Path, board: SummaryWriter) -> None:
    """A line of JSON, and TensorBoard's scalars (words as text, a dtype's share a scalar each) at ``steps``."""
    plain = finite(record)
    with metrics.open("a") as file:
        file.write(json.dumps(plain, allow_nan=False) + "\n")
    for name, value in plain.items():
        if isinstance(value, str):
            board.add_text(name, value, record["steps"])
        elif isinstance(value, dict):
            for key, share in value.items():
                board.add_scalar(f"{name}/{key}", share, record["steps"])
        elif value is not None:
            board.add_scalar(name, float(value), record["steps"])


def draw(metrics: Path, config: PPOConfig, path: Path) -> None:
    """Return, policy and loss scale over the steps; a run that went on in another dtype is titled with both."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    panels = {
        f"return, mean of {WINDOW} episodes": ["return_mean"],
        "policy": ["entropy", "approx_kl", "clip_fraction"],
        "loss scale": ["loss_scale"],
        "updates skipped so far": ["overflow_steps"],
    }
    if all(record["loss_scale"] == 1 and not record["overflow_steps"] for record in records):  # there was none
        panels = dict(list(panels.items())[:2])
    size = {"figsize": (10, 3.4 * len(panels) / 2), "layout": "constrained"}
    figure, axes = plt.subplots(len(panels) // 2, 2, sharex=True, squeeze=False, **size)
    for axis, (name, keys) in zip(axes.flat, panels.items(), strict=True):
        for key in keys:
            known = [record for record in records if record[key] is not None]
            axis.plot([record["steps"] for record in known], [record[key] for record in known], label=key)
        axis.set(title=name, xlabel="steps of all environments")
        axis.grid(alpha=0.3)
    axes.flat[1].legend()
    if len(panels) == 4:
        axes.flat[2].set_yscale("log", base=2)
    dtypes = " then ".join(dict.fromkeys(record["effective_dtype"] for record in records))
    figure.suptitle(f"{config.env}, {dtypes}, seed {config.seed}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def keep(metrics: Path, updates: int) -> None:
    """Leave records of the first updates alone: those that the checkpoint does not know are made again.

    Raises:
        Refused: a line is no record.
    """
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    try:
        whole = {line: json.loads(line)["update"] for line in lines if line.endswith("\n")}
    except (ValueError, KeyError, TypeError):
        raise Refused(f"{metrics}: a line is no record of an update: mend or remove the file") from None
    metrics.write_text("".join(line for line, update in whole.items() if update <= updates))


def train(ppo: PPO, out: Path) -> None:
    """Run to the end of its config, into the folder ``out``."""
    config, metrics = ppo.config, out / METRICS
    if ppo.updates:
        keep(metrics, ppo.updates)
    begun, told, first = time.monotonic(), 0.0, ppo.updates
    with SummaryWriter(out, purge_step=ppo.steps + 1 if ppo.updates else None) as board:
        board.add_text("provenance", f"```\n{json.dumps(ppo.provenance(), indent=2)}\n```", ppo.steps)
        reached = False
        while ppo.updates < config.updates and not reached:
            record = ppo.iterate()
            write(record, metrics, board)
            if config.stop_at is not None and len(ppo.returns) == WINDOW:
                reached = record["return_mean"] >= config.stop_at
            ended = reached or ppo.updates == config.updates
            if ended or ppo.updates % config.save_every == 0 or ppo.updates == 1:
                ppo.save(out / CHECKPOINT)
            if ended or time.monotonic() - told > 2:
                told = time.monotonic()
                print(progress(record, ppo, (told - begun) / (ppo.updates - first)), flush=True)
    if reached:
        print(f"the return has reached --stop-at {config.stop_at:g}", flush=True)
    draw(metrics, config, out / CURVES)
    if config.eval_episodes:
        returns = ppo.evaluate(config.eval_episodes)
        mean, deviation = float(np.mean(returns)), float(np.std(returns))
        print(f"{len(returns)} episodes by the most probable actions: return {mean:.1f} ± {deviation:.1f}", flush=True)
        result = {"steps": ppo.steps, "episodes": len(returns), "mean": mean, "std": deviation, "least": min(returns)}
        (out / EVALUATION).write_text(json.dumps(result | ppo.provenance(), indent=1) + "\n")


def progress(record: Mapping[str, Any], ppo: PPO, seconds: float) -> str:
    """One line; ``seconds`` is what an update takes."""
    minutes, seconds = divmod(round((ppo.config.updates - ppo.updates) * seconds), 60)
    mean = "–" if record["return_mean"] is None else f"{record['return_mean']:.1f}"
    total = ppo.steps // ppo.updates * ppo.config.updates
    return (
        f"step {ppo.steps}/{total}  return {mean}  kl {record['approx_kl']:.1e}  "
        f"ratio {record['ratio_deviation']:.1e}  loss scale {record['loss_scale']:g}  "
        f"skipped {record['overflow_steps']}  {record['steps_per_second']:.0f} steps/s  left {minutes}:{seconds:02d}"
    )


def main(words: Optional[Sequence[str]] = None) -> None:
    config, sources = parse(PPOConfig, PROGRAM, __doc__.splitlines()[0], words)
    if config.out is None:
        sys.exit(f"{PROGRAM}: --out is missing: a folder for metrics, checkpoint and figure")
    out = Path(config.out)
    try:
        if not config.resume and any((out / name).exists() for name in (METRICS, CHECKPOINT)):
            raise Refused(f"out={out} must be a folder without results, or --resume: it has another run's")
        ppo = PPO(config, sources)
        if config.resume:
            before = ppo.load(out / CHECKPOINT)
        else:
            new_folder(out)
    except (ValueError, OSError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    told, computed = ppo.precision(), dtype_name(ppo.trainer.precision.compute)
    print(
        f"{config.env}: {config.num_envs} environments ({ppo.envs.mode}), {ppo.envs.acted}; {computed} on "
        f"{ppo.device.type}, AMP {'on' if told['amp_enabled'] else 'off'} ({told['fallback'] or told['amp_source']})"
    )
    if config.resume:
        changed = "" if before == computed else f" in {computed}, before in {before}"
        print(f"going on after step {ppo.steps}{changed}; the environments start anew")
    try:
        train(ppo, out)
    except (Refused, LossScaleError, FloatingPointError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{PROGRAM}: interrupted; the same command with --resume goes on from the last checkpoint")
    ppo.envs.vector.close()
    print(f"{out}: {', '.join(sorted(file.name for file in out.iterdir()))}")


if __name__ == "__main__":
    main()
