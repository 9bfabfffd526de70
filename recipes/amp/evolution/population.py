"""Agents that evolve: a population whose trajectories are revised, recombined and selected, and learned from.

    python -m recipes.amp.evolution --env CartPole-v1 --out /tmp/evolution
    python -m recipes.amp.evolution --config configs/amp/evolution.yaml --out /tmp/evolution
    ENABLE_FP16_TRAINING=1 python -m recipes.amp.evolution --device cpu --out /tmp/evolution     fp16 on a CPU too

A trajectory is a seed and the actions taken from its reset: in a deterministic environment these replay it. So a prefix
of it can be played again and something else be tried from there: by the same policy (revision) or another member's
(recombination); what that returns is played, not guessed, and kept where it is better. A pool holds the best
trajectories of all generations. Members clone it, weighted by return, with :class:`recipes.amp.trainer.FP16Trainer`,
and the worst of them give way to mutated copies of the best. OUT gets metrics.jsonl, evolution.png and best.pt, the
trainer's checkpoint of the member whose return was the best at last.
``Policy(env, hidden).load_state_dict(read_checkpoint("best.pt")["model"])`` takes it up.

After SE-Agent (arXiv 2508.02085), which revises, recombines and refines the trajectories of a language model. Each
member lives in a Ray task; --address takes a cluster, whose nodes need this checkout. Whether to train in fp16 is
decided here once and handed to the tasks: a worker's own environment decides nothing.
"""

import json
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Optional

import gymnasium
import numpy as np
import ray
import torch
from gymnasium.spaces.utils import flatdim
from torch import nn
from torch.nn import functional as F

from recipes.amp import options
from recipes.amp.options import option
from recipes.amp.trainer import FP16Trainer
from recipes.amp.trainer_config import FP16TrainingConfig
from recipes.amp.world_model.model import flat, make_env
from verl.utils.precision import LossScaleError, report

QUIET = {"logging_level": "ERROR", "log_to_driver": False}
ORIGINS = ("collected", "revised", "recombined")
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class EvolutionConfig:
    """The population, what its members do in a generation, and how they learn.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """

    env: str = option("CartPole-v1", "a Gymnasium environment, deterministic, of discrete actions")
    out: str = option("", "folder for the results, a new one")
    seed: int = option(0, "of everything")
    fp16_training: bool = option(False, "train in float16", variable="ENABLE_FP16_TRAINING")
    device: str = option("auto", "auto, cpu or cuda of the workers; float16 on a CPU where cpu is asked for by name")
    generations: int = option(15, "each of them learns and plays; one that only plays comes before")
    population: int = option(8, "members")
    episodes: int = option(4, "that a member plays in a generation")
    revisions: int = option(4, "of its trajectories: its own policy tries again from some step")
    recombinations: int = option(4, "of its trajectories: another member's policy goes on from some step")
    elites: int = option(32, "trajectories in the pool that all learn from")
    replaced: int = option(2, "members that mutated copies of the best replace")
    mutation: float = option(0.1, "size of a mutation, in standard deviations of each weight tensor")
    temperature: float = option(1.0, "of the trajectories' weights, in standard deviations of the pool's returns")
    hidden: int = option(32, "size of a policy's hidden layer")
    epochs: int = option(2, "passes over a member's sample of the pool in a generation")
    batch_size: int = option(128, "steps of the environment an update")
    lr: float = option(5e-3, "of Adam")
    loss_scale: float = option(65536.0, "the first one, in float16")
    address: Optional[str] = option(None, "of a Ray cluster; without it Ray is started here")
    cpus: int = option(2, "that Ray started here uses")
    gpus: float = option(1.0, "that a member's task takes of a cluster where the device is cuda")

    def __post_init__(self):
        whole = ("generations", "episodes", "elites", "hidden", "epochs", "batch_size", "cpus")
        rules = {name: (getattr(self, name) >= 1, "at least 1") for name in whole}
        rules |= {name: (getattr(self, name) >= 0, "at least 0") for name in ("revisions", "recombinations")}
        rules |= {name: (0 < getattr(self, name) < math.inf, "positive") for name in ("lr", "temperature")}
        rules["out"] = (bool(self.out), "a folder: --out DIR")
        rules["seed"] = (0 <= self.seed < 2**31, "from 0 to 2147483647")
        rules["device"] = (self.device in ("auto", "cpu", "cuda"), "auto, cpu or cuda")
        rules["population"] = (self.population >= 2, "at least 2")
        whole = self.gpus < 1 or self.gpus % 1 == 0
        rules["gpus"] = (0 < self.gpus < math.inf and whole, "a share of one, or a whole number")
        rules["replaced"] = (0 <= self.replaced < self.population, f"at least 0 and below population={self.population}")
        rules["mutation"] = (0 <= self.mutation < math.inf, "at least 0")
        options.within(self, rules)
        self.trainer  # noqa: B018

    @property
    def trainer(self) -> FP16TrainingConfig:
        return FP16TrainingConfig(enabled=self.fp16_training, on_cpu=self.device == "cpu", loss_scale=self.loss_scale)


@dataclass(frozen=True)
class Trajectory:
    """An episode that ``env.reset(seed=seed)`` and the actions replay.

    Args:
        observations: (T, O), each before the action of its step.
        actions: (T,).
        rewards: (T,).
        origin: one of ``ORIGINS``.
    """

    seed: int
    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    origin: str = "collected"

    @property
    def total(self) -> float:
        return float(self.rewards.sum())


@dataclass(frozen=True)
class Member:
    """An agent: its policy's weights, the checkpoint that its training goes on from, and its first generation."""

    weights: Weights
    checkpoint: Optional[bytes] = None
    born: int = 0


class Policy(nn.Sequential):
    """Observation (…, O) -> logits of the actions (…, A)."""

    def __init__(self, env: gymnasium.Env, hidden: int):
        inputs, outputs = flatdim(env.observation_space), int(env.action_space.n)
        super().__init__(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))

    @torch.no_grad()
    def act(self, observation: np.ndarray, rng: np.random.Generator) -> int:
        """Sample an action; a step of the environment, not of the trainer: in fp32."""
        probabilities = self(torch.from_numpy(observation)).softmax(-1).double().cumsum(-1)
        return min(int((probabilities < rng.random()).sum()), len(probabilities) - 1)


def play(
    env: gymnasium.Env,
    policy: Policy,
    seed: int,
    rng: np.random.Generator,
    prefix: Sequence[int] = (),
    origin: str = "collected",
) -> Trajectory:
    """An episode from ``seed``: first the actions of ``prefix``, then the policy's.

    Raises:
        ValueError: an observation or a reward that is inf or NaN, by its step.
    """
    observations, actions, rewards = [], [], []
    observation, _ = env.reset(seed=seed)
    done = False
    while not done:
        step = len(actions)
        observations.append(flat(env.observation_space, observation, f"env={env.spec.id}, seed {seed}, step {step}"))
        actions.append(int(prefix[step]) if step < len(prefix) else policy.act(observations[-1], rng))
        observation, reward, terminated, truncated, _ = env.step(env.action_space.start + actions[-1])
        if not math.isfinite(reward):
            raise ValueError(f"env={env.spec.id}, seed {seed}, step {step + 1}: the reward is {reward}")
        rewards.append(float(reward))
        done = terminated or truncated
    return Trajectory(seed, np.stack(observations), np.array(actions), np.array(rewards), origin)


def again(env: gymnasium.Env, policy: Policy, parent: Trajectory, rng: np.random.Generator, origin: str) -> Trajectory:
    """Replay a trajectory up to some step, and go on by ``policy``.

    Raises:
        ValueError: the replay saw other observations or rewards.
    """
    step = int(rng.integers(len(parent.actions)))
    made = play(env, policy, parent.seed, rng, parent.actions[:step], origin)
    seen, told = made.observations[: step + 1], made.rewards[:step]
    if not (np.array_equal(seen, parent.observations[: step + 1]) and np.array_equal(told, parent.rewards[:step])):
        raise ValueError(f"env={env.spec.id} is not deterministic: seed {parent.seed} and its actions led elsewhere")
    return made


def check_env(config: EvolutionConfig) -> gymnasium.Env:
    """The environment, if its trajectories can be replayed and its actions be chosen from.

    Raises:
        ValueError: it is unknown, its actions are not discrete, or the same seed and actions lead elsewhere.
    """
    first, second = make_env(config.env), make_env(config.env)
    if not isinstance(first.action_space, gymnasium.spaces.Discrete):
        raise ValueError(f"env={config.env} has actions {first.action_space}: choose one of discrete actions")
    policy, rng = Policy(first, 1), np.random.default_rng(config.seed)
    for seed in (config.seed, config.seed + 1):
        one = play(first, policy, seed, rng)
        two = play(second, policy, seed, rng, one.actions)
        if not all(np.array_equal(getattr(one, of), getattr(two, of)) for of in ("observations", "actions", "rewards")):
            raise ValueError(
                f"env={config.env} is not deterministic: seed {seed} and the same actions led elsewhere, so its "
                "trajectories cannot be replayed"
            )
    return first


def select(trajectories: Sequence[Trajectory], number: int) -> list[Trajectory]:
    """The best by return; of equals those that come first."""
    return sorted(trajectories, key=lambda each: -each.total)[:number]


def learn(
    config: EvolutionConfig, device: torch.device, policy: Policy, member: Member, pool: Sequence[Trajectory], seed: int
) -> tuple[Member, dict[str, Any]]:
    """Clone a sample of the pool, drawn with replacement, each step weighted by exp(return of its trajectory).

    Returns:
        the member after it, and what its trainer saw in this generation.
    """
    policy.load_state_dict(member.weights)
    policy.to(device)
    trainer = FP16Trainer(policy, torch.optim.Adam(policy.parameters(), lr=config.lr), config.trainer)
    rng, order = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "member.pt"
        if member.checkpoint is not None:
            file.write_bytes(member.checkpoint)
            trainer.load_checkpoint(file)
        drawn = [pool[index] for index in rng.integers(len(pool), size=len(pool))]
        returns = np.array([each.total for each in pool])
        scale = config.temperature * (returns.std() + 1e-6)
        worth = np.exp([(each.total - returns.max()) / scale for each in drawn])
        lengths = [len(each.actions) for each in drawn]
        data = [
            torch.from_numpy(values).to(device)
            for values in (
                np.concatenate([each.observations for each in drawn]),
                np.concatenate([each.actions for each in drawn]),
                np.repeat(worth / np.average(worth, weights=lengths), lengths).astype(np.float32),
            )
        ]
        before, losses = trainer.overflow_steps, []
        for _ in range(config.epochs):
            for rows in torch.randperm(sum(lengths), generator=order).split(config.batch_size):
                batch = [values[rows.to(device)] for values in data]
                losses.append(trainer.training_step(batch, cloning_loss))
        trainer.save_checkpoint(file, {"config": asdict(config)})
        stats = trainer.get_stats()
        seen = {
            "loss": torch.stack(losses).mean().item(),
            "training_steps": stats["training_steps"],
            "overflow_steps": trainer.overflow_steps - before,
            "loss_scale": stats["current_scale"],
            "effective_dtype": stats["effective_dtype"],
            "fallback": stats["fallback"],
        }
        weights = {name: value.cpu() for name, value in policy.state_dict().items()}
        return Member(weights, file.read_bytes(), member.born), seen


def cloning_loss(policy: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weighted cross entropy of the actions taken, 0-d, in fp32; batch: (B, O), (B,), (B,)."""
    observations, actions, weights = batch
    losses = F.cross_entropy(policy(observations).float(), actions, reduction="none")
    return (losses * weights).mean()


def live(
    config: EvolutionConfig,
    source: str,
    device: str,
    generation: int,
    index: int,
    population: Sequence[Member],
    pool: Sequence[Trajectory],
) -> tuple[Member, list[Trajectory], dict[str, Any]]:
    """A generation of one member, in a Ray task: it learns from the pool, plays, revises and recombines.

    Args:
        source: who chose ``config.fp16_training``, for the log.
        device: of the training, chosen by the driver.
        population: all members before this generation; recombination takes another one's policy.
        pool: empty in the generation that only plays.

    Returns:
        the member, the trajectories worth selecting from (revised and recombined ones only where their return is better
        than that of the one they began as), and its row of metrics.
    """
    torch.set_num_threads(1)
    began = time.perf_counter()
    seeds = np.random.SeedSequence((config.seed, generation, index)).generate_state(2)
    rng = np.random.default_rng(int(seeds[0]))
    env = make_env(config.env)
    policy, member = Policy(env, config.hidden), population[index]
    seen: dict[str, Any] = {"overflow_steps": 0, "effective_dtype": None, "fallback": None}
    if pool:
        member, seen = learn(config, torch.device(device), policy, member, pool, int(seeds[1]))
    choice = {
        "fp16_training": config.fp16_training,
        "fp16_training_source": source,
        "effective_dtype": seen["effective_dtype"],
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    report("evolution", index, generation=generation, **choice)

    policy.cpu().load_state_dict(member.weights)
    played = [play(env, policy, int(rng.integers(2**31)), rng) for _ in range(config.episodes)]
    found, counts = list(played), {}
    others = [other for other in range(len(population)) if other != index]
    partner = Policy(env, config.hidden)
    for origin, tries in (("revised", config.revisions), ("recombined", config.recombinations)):
        gains = []
        for _ in range(tries):
            parent = found[rng.integers(len(found))]
            if origin == "recombined":
                partner.load_state_dict(population[rng.choice(others)].weights)
            made = again(env, partner if origin == "recombined" else policy, parent, rng, origin)
            gains.append(made.total - parent.total)
            if gains[-1] > 0:
                found.append(made)
        kept = [gain for gain in gains if gain > 0]
        counts[origin] = {"tried": tries, "kept": len(kept), "gained": sum(kept)}
    row = {
        "kind": "member",
        "generation": generation,
        "member": index,
        "born": member.born,
        "return_mean": float(np.mean([each.total for each in played])),
        **counts,
        **seen,
        **choice,
        "seconds": round(time.perf_counter() - began, 3),
    }
    return member, found, row


def mutated(member: Member, size: float, seed: int, born: int) -> Member:
    """A copy with noise on its weights, that begins to train anew."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: value + size * value.std(correction=0) * torch.randn(value.shape, generator=generator)
        for name, value in member.weights.items()
    }
    return Member(weights, born=born)


def choose_device(config: EvolutionConfig, nodes: Sequence[dict[str, float]]) -> str:
    """The workers' device, cpu or cuda, from what the nodes of the cluster have.

    Raises:
        ValueError: no node has what a member's task asks for: Ray would wait for one for ever.
    """
    gpus = max((node.get("GPU", 0) for node in nodes if node.get("CPU", 0) >= 1), default=None)
    if gpus is None:
        raise ValueError(f"address={config.address} must be a Ray cluster with a CPU to work on")
    if config.device == "cuda" and not gpus:
        raise ValueError("device=cuda must be auto or cpu: Ray has no GPU here")
    if config.device == "cpu" or not gpus:
        return "cpu"
    if config.gpus > gpus:
        raise ValueError(f"gpus={config.gpus} must be at most {gpus:g}, what one node of this Ray has")
    return "cuda"


@contextmanager
def ray_session(config: EvolutionConfig) -> Iterator[str]:
    """Ray, started here or at ``config.address``, for the body; a session that runs already is used, and left.

    Yields:
        the workers' device.

    Raises:
        ValueError: no cluster answers at the address, or one of another Ray; as :func:`choose_device`.
    """
    started = not ray.is_initialized()
    if started and config.address is None:
        ray.init(address="local", num_cpus=config.cpus, include_dashboard=False, **QUIET)
    elif started:
        host, _, port = config.address.rpartition(":")
        try:
            if port.isdigit() and "/" not in host:  # Ray itself would wait for minutes
                socket.create_connection((host, int(port)), timeout=5).close()
            ray.init(address=config.address, **QUIET)
        except (OSError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"address={config.address} must be a Ray cluster: {why}") from None
    try:
        yield choose_device(config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    finally:
        if started:
            ray.shutdown()


def evolve(config: EvolutionConfig, source: str = "default") -> list[dict[str, Any]]:
    """Let a population live for ``config.generations``; metrics, figure and the best member go to ``config.out``.

    Args:
        source: who chose ``config.fp16_training``.

    Returns:
        the rows of metrics.jsonl: one a member and one a generation, ``kind`` says which.

    Raises:
        ValueError: an environment that cannot be replayed, a device or a cluster that is not there, a folder with
            results.
    """
    env = check_env(config)
    torch.manual_seed(config.seed)
    population = [Member(dict(Policy(env, config.hidden).state_dict())) for _ in range(config.population)]
    pool: list[Trajectory] = []
    rows = []
    with ray_session(config) as device:
        out = options.new_folder(config.out)
        task = ray.remote(live).options(num_gpus=config.gpus if device == "cuda" else 0)
        with (out / "metrics.jsonl").open("w") as file:
            for generation in range(config.generations + 1):
                began = time.perf_counter()
                shared = [ray.put(each) for each in (population, pool)]
                calls = [
                    task.remote(config, source, device, generation, index, *shared) for index in range(len(population))
                ]
                members, found, told = zip(*ray.get(calls), strict=True)
                pool = select([*(each for some in found for each in some), *pool], config.elites)
                summary = summed(generation, told, pool) | {"seconds": round(time.perf_counter() - began, 3)}
                rows += [*told, summary]
                for row in (*told, summary):
                    file.write(json.dumps(options.finite(row), allow_nan=False) + "\n")
                file.flush()
                say(summary, config, source)
                best, population = succeeded(config, generation, members, [row["return_mean"] for row in told])
    (out / "best.pt").write_bytes(best.checkpoint)
    draw([row for row in rows if row["kind"] == "generation"], config, out / "evolution.png")
    print(", ".join(str(out / name) for name in ("metrics.jsonl", "evolution.png", "best.pt")), flush=True)
    return rows


def succeeded(
    config: EvolutionConfig, generation: int, members: Sequence[Member], returns: Sequence[float]
) -> tuple[Member, list[Member]]:
    """The best member, and the next generation: mutated copies of the best in the places of the worst."""
    ranked = sorted(range(len(members)), key=lambda index: -returns[index])
    best, following = members[ranked[0]], list(members)
    for place in ranked[len(ranked) - config.replaced :]:
        seed = np.random.SeedSequence((config.seed, generation, place, 1)).generate_state(1)
        following[place] = mutated(best, config.mutation, int(seed[0]), generation + 1)
    return best, following


def summed(generation: int, members: Sequence[dict[str, Any]], pool: Sequence[Trajectory]) -> dict[str, Any]:
    """A generation's row, of its members' rows and the pool after it."""
    returns = [row["return_mean"] for row in members]
    return {
        "kind": "generation",
        "generation": generation,
        "best": max(returns),
        "median": median(returns),
        "worst": min(returns),
        "pool_worst": pool[-1].total,
        "pool": {origin: sum(each.origin == origin for each in pool) for origin in ORIGINS},
        **{
            origin: {key: sum(row[origin][key] for row in members) for key in ("tried", "kept", "gained")}
            for origin in ORIGINS[1:]
        },
        "overflow_steps": sum(row["overflow_steps"] for row in members),
        "effective_dtypes": sorted({row["effective_dtype"] for row in members if row["effective_dtype"]}),
        "fallback": next((row["fallback"] for row in members if row["fallback"] is not None), None),
        "workers": len({(row["host"], row["pid"]) for row in members}),
    }


def say(row: dict[str, Any], config: EvolutionConfig, source: str) -> None:
    """A generation's line."""
    tried = ", ".join(
        f"{origin} {row[origin]['kept']}/{row[origin]['tried']} +{row[origin]['gained']:.0f}" for origin in ORIGINS[1:]
    )
    dtypes = "+".join(row["effective_dtypes"]) or "not trained yet"
    if row["fallback"] is not None and row["generation"] == 1:
        print(row["fallback"])
    print(
        f"generation {row['generation']}/{config.generations}: return best {row['best']:.1f} median "
        f"{row['median']:.1f} worst {row['worst']:.1f}, pool from {row['pool_worst']:.0f}, {tried}, overflows "
        f"{row['overflow_steps']}, fp16_training={config.fp16_training} by {source}, {dtypes}, {row['workers']} "
        f"workers, {row['seconds']:.1f} s",
        flush=True,
    )


def draw(rows: list[dict[str, Any]], config: EvolutionConfig, path: Path) -> None:
    """The returns of the population, and what revision and recombination gained, a generation a point."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    generations = [row["generation"] for row in rows]
    figure, (returns, gains) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    dtypes = "+".join(sorted({dtype for row in rows for dtype in row["effective_dtypes"]}))
    figure.suptitle(f"{config.env}, {config.population} members, trained in {dtypes}, seed {config.seed}")
    returns.fill_between(generations, *([row[name] for row in rows] for name in ("worst", "best")), alpha=0.2)
    for name, style in (("best", "C2"), ("median", "C0"), ("worst", "C3")):
        returns.plot(generations, [row[name] for row in rows], style, label=name)
    returns.set(title="mean return of a member", xlabel="generation", ylabel="return")
    returns.legend()
    for place, origin in enumerate(ORIGINS[1:]):
        gained = [row[origin]["gained"] / max(row[origin]["tried"], 1) for row in rows]
        gains.bar([generation + 0.4 * place - 0.2 for generation in generations], gained, 0.4, label=origin)
    gains.set(title="return gained per try (0 where a try was not kept)", xlabel="generation", ylabel="return")
    gains.legend()
    for panel in (returns, gains):
        panel.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    config, sources = options.parse(EvolutionConfig, "recipes.amp.evolution", __doc__.split("\n")[0])
    try:
        evolve(config, sources["fp16_training"])
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, ValueError | LossScaleError | FloatingPointError):
            raise
        sys.exit(f"recipes.amp.evolution: {error.cause}")
    except ValueError as error:
        sys.exit(f"recipes.amp.evolution: {error}")


if __name__ == "__main__":
    main()
