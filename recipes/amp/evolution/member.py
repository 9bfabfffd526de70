"""A member of the population: its policy, its trajectories, and its generation in a Ray task."""

import os
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import gymnasium
import numpy as np
import torch
from gymnasium.spaces.utils import flatdim
from torch import nn
from torch.nn import functional as F

from recipes.amp.environment import make_env, play_episode
from recipes.amp.options import check_values, option
from recipes.amp.trainer import FP16Trainer, FP16TrainingConfig

BRANCHES = ("revised", "recombined")


@dataclass(frozen=True)
class EvolutionConfig:
    """Size of the population, what its members do in a generation, and how they learn."""

    env: str = option("CartPole-v1", "a deterministic Gymnasium environment with discrete actions")
    out: str = option("", "a new folder for the results")
    seed: int = option(0, "seed of all random numbers", "from 0 to 2147483647")
    fp16_training: bool = option(False, "train in float16", variable="ENABLE_FP16_TRAINING")
    device: str = option("auto", "device of the workers: auto, cpu or cuda; auto trains in float32 on a CPU")
    generations: int = option(15, "generations of learning and playing, after one that only plays", "at least 1")
    population: int = option(8, "number of members")
    episodes: int = option(4, "episodes that a member plays per generation", "at least 1")
    revisions: int = option(4, "trajectories per generation that a member continues itself", "at least 0")
    recombinations: int = option(4, "trajectories per generation that another member continues", "at least 0")
    elites: int = option(32, "trajectories in the pool from which all members learn", "at least 1")
    replaced: int = option(2, "members per generation that are replaced by mutated copies of the best")
    mutation: float = option(0.1, "size of a mutation, in standard deviations of each weight tensor", "at least 0")
    temperature: float = option(1.0, "of the weights of trajectories, in standard deviations of returns", "positive")
    hidden: int = option(32, "size of a policy's hidden layer", "at least 1")
    epochs: int = option(2, "passes over a member's sample of the pool in a generation", "at least 1")
    batch_size: int = option(128, "environment steps per update", "at least 1")
    lr: float = option(5e-3, "learning rate of Adam", "positive")
    loss_scale: float = option(65536.0, "initial loss scale, in float16")
    gpus: float = option(1.0, "share of a GPU for a member's task on device cuda")

    def __post_init__(self):
        rules = {
            "device": (self.device in ("auto", "cpu", "cuda"), "auto, cpu or cuda"),
            "population": (self.population >= 2, "at least 2"),
            "replaced": (0 <= self.replaced < self.population, f"at least 0 and below population={self.population}"),
            "gpus": (0 < self.gpus <= 1, "above 0 and at most 1"),
        }
        check_values(self, rules)
        self.trainer  # noqa: B018

    @property
    def trainer(self) -> FP16TrainingConfig:
        """Return the trainer's settings."""
        return FP16TrainingConfig(enabled=self.fp16_training, on_cpu=self.device == "cpu", loss_scale=self.loss_scale)


@dataclass(frozen=True)
class Trajectory:
    """An episode that ``env.reset(seed=seed)`` and the actions replay."""

    seed: int
    observations: np.ndarray  # (T, O), each before the action of its step
    actions: np.ndarray  # (T,)
    rewards: np.ndarray  # (T,)

    @property
    def total(self) -> float:
        """Return the sum of the rewards."""
        return float(self.rewards.sum())


class Policy(nn.Sequential):
    """Observation (…, O) -> logits of the actions (…, A)."""

    def __init__(self, env: gymnasium.Env, hidden: int):
        inputs, outputs = flatdim(env.observation_space), int(env.action_space.n)
        super().__init__(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))

    @torch.no_grad()
    def act(self, observation: np.ndarray, rng: np.random.Generator) -> int:
        """Sample an action, in fp32."""
        probabilities = self(torch.from_numpy(observation)).softmax(-1).double().cumsum(-1)
        return min(int((probabilities < rng.random()).sum()), len(probabilities) - 1)


def play(
    env: gymnasium.Env, policy: Policy, seed: int, rng: np.random.Generator, prefix: Sequence[int] = ()
) -> Trajectory:
    """Play an episode from ``seed``: first the actions of ``prefix``, then the policy's."""
    replayed, start = iter(prefix), env.action_space.start

    def choose(observation: np.ndarray) -> int:
        action = next(replayed, None)
        return int(start + (policy.act(observation, rng) if action is None else action))

    observations, actions, rewards, *_ = zip(*play_episode(env, choose, seed), strict=True)
    return Trajectory(seed, np.stack(observations), np.array(actions) - start, np.array(rewards))


def branch(env: gymnasium.Env, policy: Policy, parent: Trajectory, rng: np.random.Generator) -> Trajectory:
    """Replay a trajectory up to a step that ``rng`` chooses, check the replay, and continue with ``policy``."""
    step = int(rng.integers(len(parent.actions)))
    child = play(env, policy, parent.seed, rng, parent.actions[:step])
    same_observations = np.array_equal(child.observations[: step + 1], parent.observations[: step + 1])
    if not (same_observations and np.array_equal(child.rewards[:step], parent.rewards[:step])):
        raise ValueError(f"env={env.spec.id} must be deterministic: replaying seed {parent.seed} gave other steps")
    return child


@dataclass(frozen=True)
class Member:
    """An agent of the population."""

    weights: dict[str, torch.Tensor]  # of its policy
    checkpoint: Optional[bytes] = None  # from which its training continues


def mutated(member: Member, size: float, seed: int) -> Member:
    """Return a copy that begins to train anew, with noise of ``size`` standard deviations on each weight tensor."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: value + size * value.std(correction=0) * torch.randn(value.shape, generator=generator)
        for name, value in member.weights.items()
    }
    return Member(weights)


def cloning_loss(policy: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the weighted cross entropy of the actions taken, 0-d, in fp32; batch: (B, O), (B,), (B,)."""
    observations, actions, weights = batch
    return (F.cross_entropy(policy(observations).float(), actions, reduction="none") * weights).mean()


def learn(
    config: EvolutionConfig, device: torch.device, policy: Policy, member: Member, pool: Sequence[Trajectory], seed: int
) -> tuple[Member, dict[str, Any]]:
    """Clone a sample of the pool, drawn with replacement, each step weighted by exp(return of its trajectory).

    Returns the member after it, and its trainer's statistics.
    """
    policy.load_state_dict(member.weights)
    policy.to(device)
    trainer = FP16Trainer(policy, torch.optim.Adam(policy.parameters(), lr=config.lr), config.trainer)
    rng, order = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    drawn = [pool[index] for index in rng.integers(len(pool), size=len(pool))]
    returns = np.array([each.total for each in pool])
    scale = config.temperature * (returns.std() + 1e-6)
    worth = np.exp([(each.total - returns.max()) / scale for each in drawn])
    lengths = [len(each.actions) for each in drawn]
    arrays = (
        np.concatenate([each.observations for each in drawn]),
        np.concatenate([each.actions for each in drawn]),
        np.repeat(worth / np.average(worth, weights=lengths), lengths).astype(np.float32),  # mean 1 over steps
    )
    data = [torch.from_numpy(values).to(device) for values in arrays]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "member.pt"
        if member.checkpoint is not None:
            file.write_bytes(member.checkpoint)
            trainer.load_checkpoint(file)
        overflows_before, losses = trainer.overflow_steps, []
        for _ in range(config.epochs):
            for rows in torch.randperm(sum(lengths), generator=order).split(config.batch_size):
                losses.append(trainer.training_step([values[rows.to(device)] for values in data], cloning_loss))
        trainer.save_checkpoint(file, {"config": asdict(config)})
        weights = {name: value.cpu() for name, value in policy.state_dict().items()}
        after = Member(weights, file.read_bytes())
    stats = trainer.get_stats()
    learned = {key: stats[key] for key in ("training_steps", "effective_dtype", "fallback")}
    learned |= {"loss": torch.stack(losses).mean().item(), "loss_scale": stats["current_scale"]}
    return after, learned | {"overflow_steps": trainer.overflow_steps - overflows_before}


def run_generation(
    config: EvolutionConfig,
    device: str,
    generation: int,
    index: int,
    population: Sequence[Member],
    pool: Sequence[Trajectory],
) -> tuple[Member, list[Trajectory], dict[str, Any]]:
    """Learn from the pool (empty in the generation that only plays), play episodes, and revise and recombine them.

    ``index`` is the member's in ``population``, the members before this generation. Returns the member, the
    trajectories worth selecting from (revised and recombined ones only where their return is better than their
    parent's), and its row of metrics.
    """
    torch.set_num_threads(1)
    began = time.perf_counter()
    seeds = np.random.SeedSequence((config.seed, generation, index)).generate_state(2)
    rng = np.random.default_rng(int(seeds[0]))
    env = make_env(config.env)
    policy, partner, member = Policy(env, config.hidden), Policy(env, config.hidden), population[index]
    learned: dict[str, Any] = {"overflow_steps": 0, "effective_dtype": None, "fallback": None}
    if pool:
        member, learned = learn(config, torch.device(device), policy, member, pool, int(seeds[1]))

    policy.cpu().load_state_dict(member.weights)
    played = [play(env, policy, int(rng.integers(2**31)), rng) for _ in range(config.episodes)]
    candidates, counts = list(played), {}
    others = [other for other in range(len(population)) if other != index]
    for origin, tries in zip(BRANCHES, (config.revisions, config.recombinations), strict=True):
        gains = []
        for _ in range(tries):
            parent = candidates[rng.integers(len(candidates))]
            if origin == "recombined":
                partner.load_state_dict(population[rng.choice(others)].weights)
            child = branch(env, partner if origin == "recombined" else policy, parent, rng)
            gain = child.total - parent.total
            if gain > 0:
                candidates.append(child)
                gains.append(gain)
        counts[origin] = {"tried": tries, "kept": len(gains), "gained": sum(gains)}
    row = {"kind": "member", "generation": generation, "member": index, **counts, **learned}
    row |= {"return_mean": float(np.mean([each.total for each in played]))}
    row |= {"host": socket.gethostname(), "pid": os.getpid(), "seconds": round(time.perf_counter() - began, 3)}
    return member, candidates, row
