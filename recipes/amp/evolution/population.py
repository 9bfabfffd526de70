"""Evolve the population: run each generation of its members as Ray tasks, select, and replace the worst members."""

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch

from recipes.amp.evolution.config import EvolutionConfig
from recipes.amp.evolution.generation import run_generation
from recipes.amp.evolution.member import Member, mutated
from recipes.amp.evolution.metrics import generation_row, plot_generations, print_generation
from recipes.amp.evolution.ray_session import ray_session
from recipes.amp.evolution.trajectory import Policy, Trajectory, replayable_env, select
from recipes.amp.options import finite, new_folder


def evolve(config: EvolutionConfig, source: str = "default") -> list[dict[str, Any]]:
    """Evolve a population for ``config.generations``; metrics, figure and the best member go to ``config.out``.

    Args:
        source: who chose ``config.fp16_training``.

    Returns:
        the rows of metrics.jsonl: one a member and one a generation, by ``kind``.

    Raises:
        ValueError: an environment that cannot be replayed, a device or a cluster that is not there, a folder with
            results.
    """
    env = replayable_env(config.env, config.seed)
    torch.manual_seed(config.seed)
    population = [Member(dict(Policy(env, config.hidden).state_dict())) for _ in range(config.population)]
    pool: list[Trajectory] = []
    rows = []
    with ray_session(config) as device:
        out = new_folder(config.out)
        task = ray.remote(run_generation).options(num_gpus=config.gpus if device == "cuda" else 0)
        with (out / "metrics.jsonl").open("w") as file:
            for generation in range(config.generations + 1):
                began = time.perf_counter()
                shared = [ray.put(each) for each in (population, pool)]
                calls = [
                    task.remote(config, source, device, generation, index, *shared) for index in range(len(population))
                ]
                members, trajectories, member_rows = zip(*ray.get(calls), strict=True)
                pool = select([*(each for several in trajectories for each in several), *pool], config.elites)
                summary = generation_row(generation, member_rows, pool)
                summary |= {"seconds": round(time.perf_counter() - began, 3)}
                rows += [*member_rows, summary]
                for row in (*member_rows, summary):
                    file.write(json.dumps(finite(row), allow_nan=False) + "\n")
                file.flush()
                print_generation(summary, config, source)
                returns = [row["return_mean"] for row in member_rows]
                best, population = next_generation(config, generation, members, returns)
    (out / "best.pt").write_bytes(best.checkpoint)
    plot_generations([row for row in rows if row["kind"] == "generation"], config, out / "evolution.png")
    print(", ".join(str(out / name) for name in ("metrics.jsonl", "evolution.png", "best.pt")), flush=True)
    return rows


def next_generation(
    config: EvolutionConfig, generation: int, members: Sequence[Member], returns: Sequence[float]
) -> tuple[Member, list[Member]]:
    """Return the best member, and the next population: mutated copies of the best in the places of the worst."""
    ranked = sorted(range(len(members)), key=lambda index: -returns[index])
    best, following = members[ranked[0]], list(members)
    for place in ranked[len(ranked) - config.replaced :]:
        seed = np.random.SeedSequence((config.seed, generation, place, 1)).generate_state(1)
        following[place] = mutated(best, config.mutation, int(seed[0]), generation + 1)
    return best, following
