"""PPO: settings, networks, loss, rollout, update and evaluation.

Schulman et al. 2017, arXiv 1707.06347; generalized advantages: Schulman et al. 2016, arXiv 1506.02438.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from recipes.amp.options import check_values, environment_flag, option, resolve_device
from recipes.amp.ppo.environments import Environments
from recipes.amp.trainer import FP16Trainer
from recipes.amp.trainer_config import FP16TrainingConfig, resolve_precision

KILL_SWITCH = "DISABLE_AMP"
RETURN_WINDOW = 100  # episodes that return_mean is the mean of
EVALUATION_STEPS = 10_000  # of an episode at most, where the environment has no time limit
STATS = ("effective_dtype", "effective_dtype_share", "fallback", "overflow_steps", "overflow_rate", "grad_norm")


@dataclass(frozen=True)
class PPOConfig:
    """All settings of a run; every field is an option of the command line."""

    env: str = option("CartPole-v1", "Gymnasium's name, or module:name; with Discrete or MultiDiscrete actions")
    out: Optional[str] = option(None, "folder for metrics and checkpoint; a new one unless --resume is given")
    use_amp: bool = option(False, f"autocast to --dtype; {KILL_SWITCH}=1 in the environment overrules it")
    dtype: str = option("float16", "dtype of --use-amp: float16 or bfloat16")
    device: str = option("auto", "auto, cpu or cuda; auto trains in float32 on a CPU")
    compile: bool = option(False, "compile the networks with torch.compile")
    seed: int = option(1, "seed of weights, actions, minibatches and environments", "from 0 to 2147483647")
    total_steps: int = option(150_000, "steps of all environments together, in whole updates of num_envs * num_steps")
    eval_episodes: int = option(100, "episodes of the final evaluation, by the most probable actions", "at least 1")
    resume: bool = option(False, "continue from the checkpoint in --out; the environments are reset")
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
        batch = self.num_envs * self.num_steps
        parts = f"a divisor of num_envs * num_steps = {batch} into parts of at least 4"
        rules = {
            "dtype": (lambda name: name in ("float16", "bfloat16"), "float16 or bfloat16; float32: without --use-amp"),
            "clip": (lambda value: 0 < value < 1, "between 0 and 1"),
            "num_steps": (lambda steps: steps >= 2, "at least 2: the step after an episode's last is a reset"),
            "total_steps": (lambda steps: steps >= batch, f"at least num_envs * num_steps = {batch}"),
            "minibatches": (lambda number: batch % number == 0 and batch // number >= 4, parts),
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


class Agent(torch.nn.Module):
    """A policy with a head for each factor of the action, and a separate value network; orthogonal initial weights.

    ``factors`` are the numbers of choices of each factor of an action; a Discrete action is one factor.
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


class RolloutBatch(NamedTuple):
    """Steps of a rollout without those that reset, of B rows; floats are fp32."""

    observations: torch.Tensor  # (B, inputs)
    allowed: torch.Tensor  # (B, sum of factors), bool
    actions: torch.Tensor  # (B, factors), int64
    log_probs: torch.Tensor  # (B,), of the policy that acted
    advantages: torch.Tensor  # (B,), of mean 0 and variance 1
    returns: torch.Tensor  # (B,)


def masked_log_softmax(logits: torch.Tensor, allowed: torch.Tensor, factors: Sequence[int]) -> list[torch.Tensor]:
    """Return the log-probabilities (N, choices), fp32, of each factor's choices; masked choices have probability 0.

    ``logits`` and ``allowed`` are (N, sum of factors), fp32 and bool. A masked logit becomes fp32's least: a finite
    number, so that entropy and gradients stay finite.
    """
    assert logits.dtype == torch.float32, logits.dtype
    masked = logits.masked_fill(~allowed, torch.finfo(torch.float32).min)
    return [part.log_softmax(-1) for part in masked.split(list(factors), -1)]


def joint_log_prob(log_probs: Sequence[torch.Tensor], actions: torch.Tensor) -> torch.Tensor:
    """Return the log-probability (N,) of whole actions (N, factors): the sum over factors."""
    chosen = (each.gather(-1, action) for each, action in zip(log_probs, actions.split(1, -1), strict=True))
    return sum(chosen).squeeze(-1)


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
    logits: torch.Tensor, values: torch.Tensor, batch: RolloutBatch, factors: Sequence[int], config: PPOConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return PPO's clipped loss, 0-d, fp32, and its terms for a logger, 0-d each."""
    log_probs = masked_log_softmax(logits, batch.allowed, factors)
    difference = joint_log_prob(log_probs, batch.actions) - batch.log_probs
    ratio = difference.exp()
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    policy_loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()
    value_loss = (values - batch.returns).square().mean()
    entropy = -sum((each.exp() * each).sum(-1) for each in log_probs).mean()
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
        self.agent = Agent(self.envs.inputs, self.envs.factors, config.hidden, config.layers, first).to(self.device)
        optimizer = torch.optim.Adam(self.agent.parameters(), lr=config.learning_rate, eps=1e-5, fused=True)
        self.trainer = FP16Trainer(self.agent, optimizer, training)
        if config.compile:
            self.agent.compile()
        self.generator = torch.Generator(self.device).manual_seed(config.seed)  # of actions and minibatches
        self.updates = self.episodes = 0
        self.returns: deque[float] = deque(maxlen=RETURN_WINDOW)
        self.loss_terms: list[dict[str, torch.Tensor]] = []  # of each minibatch of the last update
        self.restart_environments()

    def restart_environments(self) -> None:
        """Reset the environments, to other states each time that the run is resumed."""
        seed = np.random.SeedSequence((self.config.seed, self.updates)).generate_state(1)
        self.state = self.envs.reset(int(seed[0]))
        self._resets = np.zeros(self.config.num_envs, dtype=bool)  # whether the next step is one
        self._return_so_far = np.zeros(self.config.num_envs)

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
                state = self.state
                logits, values = self.agent(state.observations)
                log_probs = masked_log_softmax(logits, state.allowed, self.envs.factors)
                actions = torch.cat([p.exp().multinomial(1, generator=self.generator) for p in log_probs], -1)
                self.state, rewards, terminated, truncated = self.envs.step(actions)
                ended = terminated | truncated
                outcome = (rewards.astype(np.float32), terminated, ended, ~self._resets)
                log_prob = joint_log_prob(log_probs, actions)
                transitions.append((*state, actions, log_prob, values, *map(torch.from_numpy, outcome)))
                self._return_so_far += rewards
                self.returns.extend(self._return_so_far[ended].tolist())
                self.episodes += int(ended.sum())
                self._return_so_far[ended] = 0.0
                self._resets = ended
            _, last = self.agent(self.state.observations)
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
        loss, terms = ppo_loss(*agent(batch.observations), batch, self.envs.factors, self.config)
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
        """Return the dtype, its source, and the overflows up to now; ``effective_dtype`` is observed in an update."""
        stats = self.trainer.get_stats()
        amp = {"amp_enabled": self.trainer.precision.compute != torch.float32, "amp_source": self.amp_source}
        return amp | {name: stats[name] for name in STATS} | {"loss_scale": stats["current_scale"]}

    def evaluate(self, episodes: int) -> list[float]:
        """Return the returns of ``episodes`` parallel episodes by the most probable actions, in the same dtype."""
        envs, returns = Environments(self.config.env, episodes, self.device, self.largest), np.zeros(episodes)
        state, running = envs.reset(self.config.seed + 2**31), np.ones(episodes, dtype=bool)
        with torch.no_grad(), self.trainer.precision.autocast(self.device.type):
            for _ in range(envs.vector.spec.max_episode_steps or EVALUATION_STEPS):
                log_probs = masked_log_softmax(self.agent(state.observations)[0], state.allowed, envs.factors)
                actions = torch.stack([each.argmax(-1) for each in log_probs], -1)
                state, rewards, terminated, truncated = envs.step(actions)
                returns += rewards * running
                running &= ~(terminated | truncated)
                if not running.any():
                    break
        envs.vector.close()
        return returns.tolist()
