"""Evolve a population of agents that revise, recombine, select and learn from their trajectories.

    python -m recipes.amp.evolution --env CartPole-v1 --out /tmp/evolution
    python -m recipes.amp.evolution --config configs/amp/evolution.yaml --out /tmp/evolution
    ENABLE_FP16_TRAINING=1 python -m recipes.amp.evolution --device cpu --out /tmp/evolution     fp16 on a CPU too

In a deterministic environment, a seed and the actions replay a trajectory. So a prefix of it can be replayed and
continued differently: by the same policy (revision) or another member's (recombination). The result is kept if its
return is higher. Members clone the pool of the best trajectories of all generations, weighted by return, with
:class:`recipes.amp.trainer.FP16Trainer`, and mutated copies of the best replace the worst members. OUT gets
metrics.jsonl and best.pt, the checkpoint of the last generation's best member, which
``Policy(env, hidden).load_state_dict(read_checkpoint("best.pt")["model"])`` loads.

After SE-Agent (arXiv 2508.02085), which does so with the trajectories of a language model. Each member runs in a Ray
task; the nodes of a cluster (RAY_ADDRESS) need this checkout. The driver decides whether to train in fp16; a worker's
own environment is not read.
"""

import os
import socket
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import gymnasium
import numpy as np
import ray
import torch

from recipes.amp.environment import make_env
from recipes.amp.evolution.member import (
    BRANCHES,
    EvolutionConfig,
    Member,
    Policy,
    Trajectory,
    branch,
    mutated,
    play,
    run_generation,
)
from recipes.amp.options import append_record, new_folder, parse_config
from verl.utils.precision import LossScaleError

PROGRAM = "recipes.amp.evolution"
QUIET = {"logging_level": "ERROR", "log_to_driver": False}


def replayable_env(name: str, seed: int) -> gymnasium.Env:
    """Make an environment of discrete actions, and check that another instance replays two of its trajectories."""
    first, second = make_env(name), make_env(name)
    if not isinstance(first.action_space, gymnasium.spaces.Discrete):
        raise ValueError(f"env={name} has actions {first.action_space}: choose an environment with discrete actions")
    policy, rng = Policy(first, 1), np.random.default_rng(seed)
    for each in (seed, seed + 1):
        branch(second, policy, play(first, policy, each, rng), rng)
    return first


def start_ray(config: EvolutionConfig) -> str:
    """Start Ray here, or join the cluster of RAY_ADDRESS; return the workers' device, cpu or cuda.

    A session that runs is used. A task that fits no node is refused: Ray would wait for one indefinitely.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not ray.is_initialized() and not address:
        ray.init(address="local", include_dashboard=False, **QUIET)
    elif not ray.is_initialized():
        host, _, port = address.rpartition(":")
        try:
            if port.isdigit() and "/" not in host:  # Ray itself would wait for minutes
                socket.create_connection((host, int(port)), timeout=5).close()
            ray.init(address=address, **QUIET)
        except (OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"RAY_ADDRESS={address} must be HOST:PORT of a Ray cluster: {reason}") from None
    has_gpu = ray.cluster_resources().get("GPU", 0) >= 1
    if config.device == "cuda" and not has_gpu:
        raise ValueError("device=cuda must be auto or cpu: Ray has no GPU here")
    return "cuda" if has_gpu and config.device != "cpu" else "cpu"


def select(trajectories: Sequence[Trajectory], number: int) -> list[Trajectory]:
    """Return the best by return; of equals those that come first."""
    return sorted(trajectories, key=lambda each: -each.total)[:number]


def next_generation(
    config: EvolutionConfig, generation: int, members: Sequence[Member], returns: Sequence[float]
) -> tuple[Member, list[Member]]:
    """Return the best member, and the next population, where mutated copies of the best replace the worst."""
    ranked = sorted(range(len(members)), key=lambda index: -returns[index])
    best, following = members[ranked[0]], list(members)
    for place in ranked[len(ranked) - config.replaced :]:
        seed = np.random.SeedSequence((config.seed, generation, place, 1)).generate_state(1)
        following[place] = mutated(best, config.mutation, int(seed[0]))
    return best, following


def generation_row(generation: int, members: Sequence[dict[str, Any]], pool: Sequence[Trajectory]) -> dict[str, Any]:
    """Return a generation's row, from its members' rows and the pool after it."""
    returns = [row["return_mean"] for row in members]
    row = {"kind": "generation", "generation": generation}
    row |= {"best": max(returns), "median": median(returns), "worst": min(returns), "pool_worst": pool[-1].total}
    for origin in BRANCHES:
        row[origin] = {key: sum(each[origin][key] for each in members) for key in ("tried", "kept", "gained")}
    row["overflow_steps"] = sum(each["overflow_steps"] for each in members)
    row["effective_dtypes"] = sorted({each["effective_dtype"] for each in members if each["effective_dtype"]})
    return row | {"fallback": next((each["fallback"] for each in members if each["fallback"] is not None), None)}


def evolve(config: EvolutionConfig, source: str = "default") -> list[dict[str, Any]]:
    """Evolve a population for ``config.generations``; metrics and the best member go to ``config.out``.

    Returns the rows of metrics.jsonl: one a member and one a generation, by ``kind``. ``source`` is that of
    ``config.fp16_training``.
    """
    env = replayable_env(config.env, config.seed)
    torch.manual_seed(config.seed)
    population = [Member(dict(Policy(env, config.hidden).state_dict())) for _ in range(config.population)]
    pool, rows = [], []
    device = start_ray(config)
    out = new_folder(config.out)
    task = ray.remote(run_generation).options(num_gpus=config.gpus if device == "cuda" else 0)
    for generation in range(config.generations + 1):
        began = time.perf_counter()
        shared = [ray.put(each) for each in (population, pool)]
        calls = [task.remote(config, device, generation, index, *shared) for index in range(len(population))]
        members, trajectories, member_rows = zip(*ray.get(calls), strict=True)
        pool = select([*(each for several in trajectories for each in several), *pool], config.elites)
        summary = generation_row(generation, member_rows, pool)
        summary["seconds"] = round(time.perf_counter() - began, 3)
        for row in (*member_rows, summary):
            rows.append(row)
            append_record(out, row)
        if generation == 1 and summary["fallback"] is not None:
            print(summary["fallback"])
        kept = ", ".join(f"{origin} {summary[origin]['kept']}/{summary[origin]['tried']}" for origin in BRANCHES)
        print(
            f"generation {generation}/{config.generations}: return best {summary['best']:.1f} median "
            f"{summary['median']:.1f} worst {summary['worst']:.1f}, {kept}, overflows {summary['overflow_steps']}, "
            f"fp16_training={config.fp16_training} by {source}, "
            f"{'+'.join(summary['effective_dtypes']) or 'not trained yet'}, {summary['seconds']:.1f} s",
            flush=True,
        )
        returns = [row["return_mean"] for row in member_rows]
        best, population = next_generation(config, generation, members, returns)
    (out / "best.pt").write_bytes(best.checkpoint)
    print(out / "best.pt", flush=True)
    return rows


def main() -> None:
    """Run the command line; an error ends the process with one line and code 1."""
    config, sources = parse_config(EvolutionConfig, PROGRAM, __doc__.splitlines()[0])
    try:
        evolve(config, sources["fp16_training"])
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, ValueError | LossScaleError | FloatingPointError):
            raise
        sys.exit(f"{PROGRAM}: {error.cause}")
    except ValueError as error:
        sys.exit(f"{PROGRAM}: {error}")


if __name__ == "__main__":
    main()
