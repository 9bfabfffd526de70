"""Evolve a population of agents that revise, recombine, select and learn from their trajectories.

    python -m recipes.amp.evolution --env CartPole-v1 --out /tmp/evolution
    python -m recipes.amp.evolution --config configs/amp/evolution.yaml --out /tmp/evolution
    ENABLE_FP16_TRAINING=1 python -m recipes.amp.evolution --device cpu --out /tmp/evolution     fp16 on a CPU too

A trajectory is a seed and the actions taken from its reset: in a deterministic environment these replay it. So a prefix
of it can be replayed and continued differently: by the same policy (revision) or another member's (recombination).
The result is played, not estimated, and kept if its return is higher. A pool contains the best trajectories of all
generations. Members clone it, weighted by return, with :class:`recipes.amp.trainer.FP16Trainer`, and the worst members
are replaced by mutated copies of the best. OUT gets metrics.jsonl, evolution.png and best.pt, the
trainer's checkpoint of the member with the best return in the last generation, which
``Policy(env, hidden).load_state_dict(read_checkpoint("best.pt")["model"])`` loads.

After SE-Agent (arXiv 2508.02085), which revises, recombines and refines the trajectories of a language model. Each
member runs in a Ray task; --address takes a cluster, whose nodes need this checkout. Whether to train in fp16 is
decided once by the driver and passed to the tasks: a worker's own environment is not read.
"""

import sys

import ray

from recipes.amp.evolution.config import EvolutionConfig
from recipes.amp.evolution.population import evolve
from recipes.amp.options import parse
from verl.utils.precision import LossScaleError

PROGRAM = "recipes.amp.evolution"


def main() -> None:
    """Run the command line; an error ends the process with one line and code 1."""
    config, sources = parse(EvolutionConfig, PROGRAM, __doc__.splitlines()[0])
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
