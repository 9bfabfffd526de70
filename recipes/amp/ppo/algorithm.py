"""PPO: rollout, update and evaluation, with networks, environments and random numbers of its own."""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Optional

import numpy as np
import torch

from recipes.amp.options import device, flag
from recipes.amp.ppo.agent import Agent, joint_log_prob, masked_log_softmax
from recipes.amp.ppo.config import KILL_SWITCH, RETURN_WINDOW, PPOConfig
from recipes.amp.ppo.environments import Environments
from recipes.amp.ppo.objective import RolloutBatch, generalised_advantages, ppo_loss
from recipes.amp.trainer import FP16Trainer

EVALUATION_STEPS = 10_000  # of an episode at most, where the environment has no time limit


class PPO:
    """A run in memory: networks, optimizer, environments and progress. It writes no file.

    Args:
        sources: who set each field of ``config``, as :func:`recipes.amp.options.parse` returns it.

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
        """Act for num_steps steps of every environment, in the dtype that the update trains in.

        Raises:
            InvalidEnvironmentError: as :meth:`Environments.step`.
        """
        factors, transitions = self.envs.factors, []
        # A region of its own, in which weights are cast once; the effective dtype is observed in the update's.
        with torch.no_grad(), self.trainer.precision.autocast(self.device.type):
            for _ in range(self.config.num_steps):
                state = self.state
                logits, values = self.agent(state.observations)
                log_probs = masked_log_softmax(logits, state.allowed, factors)
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
        *acted, values, rewards, terminated, ended, valid = (
            torch.stack(each).to(self.device) for each in zip(*transitions, strict=True)
        )
        advantages = generalised_advantages(
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
        """Train for ``epochs`` passes over the batch, one update of the trainer a minibatch.

        Returns:
            means over the minibatches; but ``ratio_deviation``, the mean of |ratio - 1|, is the first one's, before any
            step: the effect of dtypes and kernels at equal weights.

        Raises:
            LossScaleError, FloatingPointError: too many skipped updates in a row.
        """
        config, self.loss_terms = self.config, []
        learning_rate = config.learning_rate * (1 - self.updates / config.updates if config.anneal else 1.0)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = learning_rate
        for _ in range(config.epochs):
            order = torch.randperm(len(batch.actions), generator=self.generator, device=self.device)
            for rows in order.tensor_split(config.minibatches):
                self.trainer.training_step(RolloutBatch(*(each[rows] for each in batch)), self.loss)
        terms = self.loss_terms
        means = {name: torch.stack([each[name] for each in terms]).mean().item() for name in terms[0]}
        first = terms[0]["ratio_deviation"].item()
        return means | {"ratio_deviation": first, "learning_rate": learning_rate}

    def iterate(self) -> dict[str, Any]:
        """Collect a rollout and update on it.

        Returns:
            the update's record, for a logger.

        Raises:
            InvalidEnvironmentError, LossScaleError, FloatingPointError: as :meth:`collect` and :meth:`learn`.
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
        """Return the dtype, who chose it, and the overflows up to now.

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
        """Return the returns of ``episodes`` episodes, side by side, by the most probable actions, in the same dtype.

        Where the environment has no time limit, they are cut off after ``EVALUATION_STEPS``.
        """
        config, returns = self.config, np.zeros(episodes)
        envs = Environments(config.env, episodes, self.envs.mode.replace("async", "sync"), self.device)
        envs.largest = self.envs.largest
        state, running = envs.reset(config.seed + 2**31), np.ones(episodes, dtype=bool)
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
