"""PPO: settings, environments, network, loss, rollout, update and evaluation.

Schulman et al. 2017, arXiv 1707.06347; generalized advantages: Schulman et al. 2016, arXiv 1506.02438.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Optional

import gymnasium
import numpy as np
import torch
from gymnasium.spaces.utils import flatdim
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import FlattenObservation

from recipes.amp.environment import InvalidEnvironmentError, make_env
from recipes.amp.options import check_values, environment_flag, option, resolve_device
from recipes.amp.trainer import FP16Trainer, FP16TrainingConfig, resolve_precision

KILL_SWITCH = "DISABLE_AMP"
RETURN_WINDOW = 100  # episodes that return_mean is the mean of
EVALUATION_STEPS = 10_000  # of an episode at most, where the environment has no time limit
STATS = ("effective_dtype", "effective_dtype_share", "fallback", "overflow_steps", "overflow_rate", "grad_norm")


@dataclass(frozen=True)
class PPOConfig:
    """All settings of a run; every field is an option of the command line."""

    env: str = option("CartPole-v1", "Gymnasium's name, or module:name; with Discrete actions")
    out: str = option("", "a new folder for metrics and checkpoint")
    use_amp: bool = option(False, f"autocast to --dtype; {KILL_SWITCH}=1 in the environment overrules it")
    dtype: str = option("float16", "dtype of --use-amp: float16 or bfloat16")
    device: str = option("auto", "auto, cpu or cuda; auto trains in float32 on a CPU")
    compile: bool = option(False, "compile the networks with torch.compile")
    seed: int = option(1, "seed of weights, actions, minibatches and environments", "from 0 to 2147483647")
    total_steps: int = option(150_000, "steps of all environments together, in whole updates of num_envs * num_steps")
    eval_episodes: int = option(100, "episodes of the final evaluation, by the most probable actions", "at least 1")
    num_envs: int = option(32, "number of environments", "at least 1")
    num_steps: int = option(64, "steps of each environment between updates")
    minibatches: int = option(4, "minibatches per epoch", "at least 1")
    epochs: int = option(10, "passes over each batch", "at least 1")
    hidden: int = option(64, "width of the hidden layers", "at least 1")
    layers: int = option(2, "hidden layers of the policy, and of the value network", "at least 1")
    learning_rate: float = option(1e-3, "initial learning rate of Adam; falls linearly to 0", "positive")
    gamma: float = option(0.98, "discount factor per step", "between 0 and 1")
    gae_lambda: float = option(0.9, "lambda of generalized advantages", "between 0 and 1")
    clip: float = option(0.2, "clipping range of the probability ratio")
    entropy_coefficient: float = option(0.0, "weight of the entropy in the objective", "at least 0")
    value_coefficient: float = option(0.5, "weight of the value loss", "positive")
    max_grad_norm: float = option(0.5, "clip the unscaled gradients to this L2 norm")
    loss_scale: float = option(65536.0, "initial loss scale, in float16")

    def __post_init__(self):
        batch, parts = self.num_envs * self.num_steps, self.minibatches
        divisor = f"a divisor of num_envs * num_steps = {batch} into parts of at least 4"
        allowed = "float16 or bfloat16; float32: without --use-amp"
        rules = {
            "dtype": (self.dtype in ("float16", "bfloat16"), allowed),
            "clip": (0 < self.clip < 1, "between 0 and 1"),
            "num_steps": (self.num_steps >= 2, "at least 2: the step after an episode's last is a reset"),
            "total_steps": (self.total_steps >= batch, f"at least num_envs * num_steps = {batch}"),
            "minibatches": (parts >= 1 and batch % parts == 0 and batch // parts >= 4, divisor),
        }
        check_values(self, rules)
        self.training(False)
        environment_flag(KILL_SWITCH)

    @property
    def updates(self) -> int:
        """Return the number of updates, each on a batch of num_envs * num_steps."""
        return self.total_steps // (self.num_envs * self.num_steps)

    def training(self, amp: bool) -> FP16TrainingConfig:
        """Return the trainer's settings, with autocast enabled or not."""
        same = {key: getattr(self, key) for key in ("dtype", "loss_scale", "max_grad_norm")}
        return FP16TrainingConfig(enabled=amp, on_cpu=resolve_device(self.device)[1], **same)


class Environments:
    """A vector environment of tensors; the step after an episode's last is a reset (Gymnasium's NEXT_STEP).

    So an episode's last observation is part of the rollout, and bootstrapping from it needs no extra forward.
    ``largest`` is the absolute value of an observation that the networks can represent.
    """

    def __init__(self, env: str, number: int, device: torch.device, largest: float):
        self.env, self.number, self.device, self.largest, self.step_number = env, number, device, largest, 0
        vector = make_env(env, gymnasium.make_vec, num_envs=number)
        if vector.metadata["autoreset_mode"] != AutoresetMode.NEXT_STEP:
            raise InvalidEnvironmentError(f"env={env}: its vector environment must reset in mode NEXT_STEP")
        if not isinstance(vector.single_observation_space, gymnasium.spaces.Box):
            vector = FlattenObservation(vector)
        acted = vector.single_action_space
        if not isinstance(acted, gymnasium.spaces.Discrete):
            raise InvalidEnvironmentError(f"env={env}: actions are {acted}, but must be Discrete")
        self.vector, self.choices, self.start = vector, int(acted.n), acted.start
        self.inputs = flatdim(vector.single_observation_space)

    def reset(self, seed: int) -> torch.Tensor:
        """Reset all environments, and return their observations (N, inputs), fp32."""
        return self._flat(self.vector.reset(seed=seed)[0])

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, np.ndarray, np.ndarray, np.ndarray]:
        """Take actions (N,), and return the next observations; rewards, terminated and truncated, (N,) each."""
        observations, rewards, terminated, truncated, _ = self.vector.step(actions.cpu().numpy() + self.start)
        self.step_number += 1
        self._check("reward", rewards, np.isfinite(rewards), "finite")
        return self._flat(observations), rewards, terminated, truncated

    def _flat(self, observations: np.ndarray) -> torch.Tensor:
        flat = np.asarray(observations, dtype=np.float32).reshape(self.number, self.inputs)
        representable = np.abs(flat) <= self.largest  # false of NaN
        self._check("observation", flat, representable, f"finite and at most {self.largest:.5g}")
        return torch.from_numpy(flat).to(self.device)

    def _check(self, name: str, values: np.ndarray, good: np.ndarray, allowed: str) -> None:
        if not good.all():
            index, *place = np.argwhere(~good)[0].tolist()
            raise InvalidEnvironmentError(
                f"env={self.env}: {name}{place or ''} of environment {index} (of {self.number}) at step "
                f"{self.step_number} is {values[(index, *place)]}: must be {allowed}"
            )


class Agent(torch.nn.Module):
    """A policy and a separate value network; orthogonal initial weights."""

    def __init__(self, inputs: int, choices: int, hidden: int, layers: int, generator: torch.Generator):
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
        self.policy_head, self.value_head = linear(hidden, choices, 0.01), linear(hidden, 1, 1.0)

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """observations (N, inputs) -> log-probabilities (N, choices) and values (N,), both fp32."""
        logits = self.policy_head(self.policy(observations)).float()  # or exp would overflow in fp16
        return logits.log_softmax(-1), self.value_head(self.value(observations)).squeeze(-1).float()


class RolloutBatch(NamedTuple):
    """Steps of a rollout without those that reset, of B rows; floats are fp32."""

    observations: torch.Tensor  # (B, inputs)
    actions: torch.Tensor  # (B,), int64
    log_probs: torch.Tensor  # (B,), of the policy that acted
    advantages: torch.Tensor  # (B,), of mean 0 and variance 1
    returns: torch.Tensor  # (B,)


def of_actions(log_probs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities (N,) of the actions (N,) from those of all choices (N, choices)."""
    return log_probs.gather(-1, actions[:, None]).squeeze(-1)


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, terminated: torch.Tensor, ended: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Return advantages (T, N), fp32; those of steps that reset are undefined.

    ``ended`` is terminated or truncated, (T, N) like all but ``values`` (T + 1, N), which include the observation after
    the last step. After a terminated episode the value is 0; after one that was cut off, by its time limit or by the
    rollout's end, it is the value of the last observation.
    """
    deltas = rewards + gamma * values[1:] * ~terminated - values[:-1]
    advantages = torch.empty_like(deltas)
    following = torch.zeros_like(deltas[0])
    for step in reversed(range(len(deltas))):
        following = deltas[step] + gamma * lam * ~ended[step] * following
        advantages[step] = following
    return advantages


def ppo_loss(
    log_probs: torch.Tensor, values: torch.Tensor, batch: RolloutBatch, config: PPOConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return PPO's clipped loss, 0-d, fp32, and its terms for a logger, 0-d each."""
    difference = of_actions(log_probs, batch.actions) - batch.log_probs
    ratio = difference.exp()
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    policy_loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()
    value_loss = (values - batch.returns).square().mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    loss = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
    terms = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": (ratio - 1 - difference).mean(),  # an estimate of KL(old, new) that is never negative
        "clip_fraction": (ratio != clipped).float().mean(),
        "ratio_deviation": (ratio - 1).abs().mean(),
    }
    return loss, {name: term.detach() for name, term in terms.items()}


class PPO:
    """A run in memory: networks, optimizer, environments and progress; ``sources`` are those of ``parse_config``."""

    def __init__(self, config: PPOConfig, sources: Optional[Mapping[str, str]] = None):
        self.config, self.sources = config, dict(sources or {})
        self.device, _ = resolve_device(config.device)
        killed = environment_flag(KILL_SWITCH) is True
        self.amp_source = f"environment ({KILL_SWITCH})" if killed else self.sources.get("use_amp", "default")
        training = config.training(config.use_amp and not killed)
        self.largest = torch.finfo(resolve_precision(training, self.device)[0].compute).max
        self.envs = Environments(config.env, config.num_envs, self.device, self.largest)
        np.random.seed(config.seed)  # for environments that draw from it
        first = torch.Generator().manual_seed(config.seed)
        self.agent = Agent(self.envs.inputs, self.envs.choices, config.hidden, config.layers, first).to(self.device)
        optimizer = torch.optim.Adam(self.agent.parameters(), lr=config.learning_rate, eps=1e-5, fused=True)
        self.trainer = FP16Trainer(self.agent, optimizer, training)
        if config.compile:
            self.agent.compile()
        self.generator = torch.Generator(self.device).manual_seed(config.seed)  # of actions and minibatches
        self.updates = self.episodes = 0
        self.returns: deque[float] = deque(maxlen=RETURN_WINDOW)
        self.loss_terms: list[dict[str, torch.Tensor]] = []  # of each minibatch of the last update
        self.observations = self.envs.reset(int(np.random.SeedSequence((config.seed, 0)).generate_state(1)[0]))
        self._resets = np.zeros(config.num_envs, dtype=bool)  # whether the next step is one
        self._return_so_far = np.zeros(config.num_envs)

    @property
    def steps(self) -> int:
        """Return the number of steps of all environments together, resets included."""
        return self.updates * self.config.num_envs * self.config.num_steps

    def collect(self) -> RolloutBatch:
        """Act for num_steps steps of every environment, in the dtype that the update trains in."""
        transitions = []
        # A separate region, which casts the weights once; the trainer's own region observes the effective dtype.
        with torch.no_grad(), self.trainer.precision.autocast(self.device.type):
            for _ in range(self.config.num_steps):
                observations = self.observations
                log_probs, values = self.agent(observations)
                actions = log_probs.exp().multinomial(1, generator=self.generator).squeeze(-1)
                self.observations, rewards, terminated, truncated = self.envs.step(actions)
                ended = terminated | truncated
                acted = (observations, actions, of_actions(log_probs, actions), values)
                outcome = (rewards.astype(np.float32), terminated, ended, ~self._resets)
                transitions.append((*acted, *map(torch.from_numpy, outcome)))
                self._return_so_far += rewards
                self.returns.extend(self._return_so_far[ended].tolist())
                self.episodes += int(ended.sum())
                self._return_so_far[ended] = 0.0
                self._resets = ended
            _, last = self.agent(self.observations)
        # Each (T, N, …); a mask of the valid steps then flattens the first two dimensions.
        *acted, values, rewards, terminated, ended, valid = (
            torch.stack(each).to(self.device) for each in zip(*transitions, strict=True)
        )
        advantages = generalized_advantages(
            rewards, torch.cat([values, last[None]]), terminated, ended, self.config.gamma, self.config.gae_lambda
        )
        batch = RolloutBatch(*(each[valid] for each in (*acted, advantages, advantages + values)))
        deviation = batch.advantages.std(correction=0) + 1e-8
        return batch._replace(advantages=(batch.advantages - batch.advantages.mean()) / deviation)

    def loss(self, agent: torch.nn.Module, batch: RolloutBatch) -> torch.Tensor:
        """Return the loss of a minibatch, 0-d, fp32, and append its terms to ``loss_terms``."""
        loss, terms = ppo_loss(*agent(batch.observations), batch, self.config)
        self.loss_terms.append(terms)
        return loss

    def learn(self, batch: RolloutBatch) -> dict[str, float]:
        """Train for ``epochs`` passes over the batch, with one update of the trainer per minibatch.

        Returns means over the minibatches. ``ratio_deviation``, the mean of |ratio - 1|, is the first one's, before any
        step: the effect of dtypes and kernels at equal weights.
        """
        config, self.loss_terms = self.config, []
        learning_rate = config.learning_rate * (1 - self.updates / config.updates)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = learning_rate
        for _ in range(config.epochs):
            order = torch.randperm(len(batch.actions), generator=self.generator, device=self.device)
            for rows in order.tensor_split(config.minibatches):
                self.trainer.training_step(RolloutBatch(*(each[rows] for each in batch)), self.loss)
        terms = self.loss_terms
        means = {name: torch.stack([each[name] for each in terms]).mean().item() for name in terms[0]}
        return means | {"ratio_deviation": terms[0]["ratio_deviation"].item(), "learning_rate": learning_rate}

    def iterate(self) -> dict[str, Any]:
        """Collect a rollout, update on it, and return the update's record, for a logger."""
        begun = time.perf_counter()
        learned = self.learn(self.collect())
        seconds = time.perf_counter() - begun
        self.updates += 1
        return {
            "update": self.updates,
            "steps": self.steps,
            "episodes": self.episodes,
            "return_mean": sum(self.returns) / len(self.returns) if self.returns else None,
            **learned,
            **self.precision(),
            "steps_per_second": self.config.num_envs * self.config.num_steps / seconds,
        }

    def precision(self) -> dict[str, Any]:
        """Return the dtype, its source, and the overflows up to now; ``effective_dtype`` is observed in an update."""
        stats = self.trainer.get_stats()
        amp = {"amp_enabled": self.trainer.precision.compute != torch.float32, "amp_source": self.amp_source}
        return amp | {name: stats[name] for name in STATS} | {"loss_scale": stats["current_scale"]}

    def evaluate(self, episodes: int) -> list[float]:
        """Return the returns of ``episodes`` parallel episodes by the most probable actions, in the same dtype."""
        envs, returns = Environments(self.config.env, episodes, self.device, self.largest), np.zeros(episodes)
        observations, running = envs.reset(self.config.seed + 2**31), np.ones(episodes, dtype=bool)
        with torch.no_grad(), self.trainer.precision.autocast(self.device.type):
            for _ in range(envs.vector.spec.max_episode_steps or EVALUATION_STEPS):
                log_probs, _ = self.agent(observations)
                observations, rewards, terminated, truncated = envs.step(log_probs.argmax(-1))
                returns += rewards * running
                running &= ~(terminated | truncated)
                if not running.any():
                    break
        envs.vector.close()
        return returns.tolist()
