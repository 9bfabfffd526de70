"""Run one member's generation in a Ray task: learn, play, revise, recombine."""

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from recipes.amp.environment import make_env
from recipes.amp.evolution.config import EvolutionConfig
from recipes.amp.evolution.member import Member, learn
from recipes.amp.evolution.trajectory import Policy, Trajectory, branch, play
from verl.utils.precision import report


def run_generation(
    config: EvolutionConfig,
    source: str,
    device: str,
    generation: int,
    index: int,
    population: Sequence[Member],
    pool: Sequence[Trajectory],
) -> tuple[Member, list[Trajectory], dict[str, Any]]:
    """Learn from the pool, play episodes, and revise and recombine them.

    Args:
        source: who chose ``config.fp16_training``, for the log.
        device: of the training, chosen by the driver.
        index: the member's, in ``population``.
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
    learned: dict[str, Any] = {"overflow_steps": 0, "effective_dtype": None, "fallback": None}
    if pool:
        member, learned = learn(config, torch.device(device), policy, member, pool, int(seeds[1]))
    choice = {
        "fp16_training": config.fp16_training,
        "fp16_training_source": source,
        "effective_dtype": learned["effective_dtype"],
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    report("evolution", index, generation=generation, **choice)

    policy.cpu().load_state_dict(member.weights)
    played = [play(env, policy, int(rng.integers(2**31)), rng) for _ in range(config.episodes)]
    candidates, counts = list(played), {}
    others = [other for other in range(len(population)) if other != index]
    partner = Policy(env, config.hidden)
    for origin, tries in (("revised", config.revisions), ("recombined", config.recombinations)):
        gains = []
        for _ in range(tries):
            parent = candidates[rng.integers(len(candidates))]
            if origin == "recombined":
                partner.load_state_dict(population[rng.choice(others)].weights)
            child = branch(env, partner if origin == "recombined" else policy, parent, rng, origin)
            gains.append(child.total - parent.total)
            if gains[-1] > 0:
                candidates.append(child)
        kept = [gain for gain in gains if gain > 0]
        counts[origin] = {"tried": tries, "kept": len(kept), "gained": sum(kept)}
    row = {
        "kind": "member",
        "generation": generation,
        "member": index,
        "born": member.born,
        "return_mean": float(np.mean([each.total for each in played])),
        **counts,
        **learned,
        **choice,
        "seconds": round(time.perf_counter() - began, 3),
    }
    return member, candidates, row
