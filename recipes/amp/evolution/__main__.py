"""Evolve a population of agents that revise, recombine, select and learn from their trajectories.

    python -m recipes.amp.evolution --env CartPole-v1 --out /tmp/evolution
    python -m recipes.amp.evolution --config configs/amp/evolution.yaml --out /tmp/evolution
    ENABLE_FP16_TRAINING=1 python -m recipes.amp.evolution --device cpu --out /tmp/evolution     fp16 on a CPU too

In a deterministic environment, a seed and the actions replay a trajectory. So a prefix of it can be replayed and
continued differently: by the same policy (revision) or another member's (recombination). The result is kept if its
return is higher. Members clone the pool of the best trajectories of all generations, weighted by return, with
:class:`recipes.amp.trainer.FP16Trainer`, and mutated copies of the best replace the worst members. OUT gets
metrics.jsonl, evolution.png and best.pt, the checkpoint of the last generation's best member, which
``Policy(env, hidden).load_state_dict(read_checkpoint("best.pt")["model"])`` loads.

After SE-Agent (arXiv 2508.02085), which does so with the trajectories of a language model. Each member runs in a Ray
task; the nodes of a cluster (--address) need this checkout. The driver decides whether to train in fp16; a worker's own
environment is not read.
"""

import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import ray
import torch

from recipes.amp.evolution.member import EvolutionConfig, Member, mutated, run_generation
from recipes.amp.evolution.trajectory import ORIGINS, Policy, Trajectory, replayable_env
from recipes.amp.figure import plot_panels
from recipes.amp.options import finite, new_folder, parse_config
from verl.utils.precision import LossScaleError

PROGRAM = "recipes.amp.evolution"
QUIET = {"logging_level": "ERROR", "log_to_driver": False}


def choose_device(config: EvolutionConfig, nodes: Sequence[dict[str, float]]) -> str:
    """Return the workers' device, cpu or cuda, from the resources of each node of the cluster.

    Refuse a task that fits no node: Ray would wait for one indefinitely.
    """
    gpus = max((node.get("GPU", 0) for node in nodes if node.get("CPU", 0) >= 1), default=None)
    if gpus is None:
        raise ValueError(f"address={config.address} must be a Ray cluster with at least one CPU")
    if config.device == "cuda" and not gpus:
        raise ValueError("device=cuda must be auto or cpu: Ray has no GPU here")
    if config.device == "cpu" or not gpus:
        return "cpu"
    if config.gpus > gpus:
        raise ValueError(f"gpus={config.gpus} must be at most {gpus:g}, the GPUs of one node of this Ray cluster")
    return "cuda"


@contextmanager
def ray_session(config: EvolutionConfig) -> Iterator[str]:
    """Run the body with Ray, started here or at ``config.address``; a running session is used, and left running.

    Yields the workers' device.
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
            reason = " ".join(str(error).split())
            raise ValueError(f"address={config.address} must be a Ray cluster: {reason}") from None
    try:
        yield choose_device(config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    finally:
        if started:
            ray.shutdown()


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
        following[place] = mutated(best, config.mutation, int(seed[0]), generation + 1)
    return best, following


def generation_row(generation: int, members: Sequence[dict[str, Any]], pool: Sequence[Trajectory]) -> dict[str, Any]:
    """Return a generation's row, from its members' rows and the pool after it."""
    returns = [row["return_mean"] for row in members]
    row = {"kind": "generation", "generation": generation}
    row |= {"best": max(returns), "median": median(returns), "worst": min(returns), "pool_worst": pool[-1].total}
    row["pool"] = {origin: sum(each.origin == origin for each in pool) for origin in ORIGINS}
    for origin in ORIGINS[1:]:
        row[origin] = {key: sum(each[origin][key] for each in members) for key in ("tried", "kept", "gained")}
    row["overflow_steps"] = sum(each["overflow_steps"] for each in members)
    row["effective_dtypes"] = sorted({each["effective_dtype"] for each in members if each["effective_dtype"]})
    row["fallback"] = next((each["fallback"] for each in members if each["fallback"] is not None), None)
    return row | {"workers": len({(each["host"], each["pid"]) for each in members})}


def progress_line(row: dict[str, Any], config: EvolutionConfig, source: str) -> str:
    """Return a line on a generation."""
    tried = ", ".join(
        f"{origin} {row[origin]['kept']}/{row[origin]['tried']} +{row[origin]['gained']:.0f}" for origin in ORIGINS[1:]
    )
    dtypes = "+".join(row["effective_dtypes"]) or "not trained yet"
    return (
        f"generation {row['generation']}/{config.generations}: return best {row['best']:.1f} median "
        f"{row['median']:.1f} worst {row['worst']:.1f}, pool from {row['pool_worst']:.0f}, {tried}, overflows "
        f"{row['overflow_steps']}, fp16_training={config.fp16_training} by {source}, {dtypes}, {row['workers']} "
        f"workers, {row['seconds']:.1f} s"
    )


def evolve(config: EvolutionConfig, source: str = "default") -> list[dict[str, Any]]:
    """Evolve a population for ``config.generations``; metrics, figure and the best member go to ``config.out``.

    Returns the rows of metrics.jsonl: one a member and one a generation, by ``kind``. ``source`` is that of
    ``config.fp16_training``.
    """
    env = replayable_env(config.env, config.seed)
    torch.manual_seed(config.seed)
    population = [Member(dict(Policy(env, config.hidden).state_dict())) for _ in range(config.population)]
    pool, rows, summaries = [], [], []
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
                summaries.append(generation_row(generation, member_rows, pool))
                summaries[-1]["seconds"] = round(time.perf_counter() - began, 3)
                for row in (*member_rows, summaries[-1]):
                    rows.append(row)
                    file.write(json.dumps(finite(row), allow_nan=False) + "\n")
                file.flush()
                if generation == 1 and summaries[-1]["fallback"] is not None:
                    print(summaries[-1]["fallback"])
                print(progress_line(summaries[-1], config, source), flush=True)
                returns = [row["return_mean"] for row in member_rows]
                best, population = next_generation(config, generation, members, returns)
    (out / "best.pt").write_bytes(best.checkpoint)
    x, panels = [row["generation"] for row in summaries], {}
    panels["mean return of a member"] = {key: (x, [r[key] for r in summaries]) for key in ("best", "median", "worst")}
    panels["return gained by branches"] = {key: (x, [r[key]["gained"] for r in summaries]) for key in ORIGINS[1:]}
    dtypes = "+".join(sorted({dtype for row in summaries for dtype in row["effective_dtypes"]}))
    title = f"{config.env}, {config.population} members, trained in {dtypes}, seed {config.seed}; by generation"
    plot_panels(panels, title, out / "evolution.png")
    print(f"{out}: {', '.join(sorted(file.name for file in out.iterdir()))}", flush=True)
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
