"""Settings of an evolution."""

import math
from dataclasses import dataclass
from typing import Optional

from recipes.amp.options import option, within
from recipes.amp.trainer_config import FP16TrainingConfig


@dataclass(frozen=True)
class EvolutionConfig:
    """Size of the population, what its members do in a generation, and how they learn.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """

    env: str = option("CartPole-v1", "a deterministic Gymnasium environment with discrete actions")
    out: str = option("", "a new folder for the results")
    seed: int = option(0, "seed of all random numbers")
    fp16_training: bool = option(False, "train in float16", variable="ENABLE_FP16_TRAINING")
    device: str = option("auto", "device of the workers: auto, cpu or cuda; auto trains in float32 on a CPU")
    generations: int = option(15, "generations of learning and playing, after a first one of playing alone")
    population: int = option(8, "number of members")
    episodes: int = option(4, "episodes that a member plays per generation")
    revisions: int = option(4, "trajectories per generation that a member continues from some step by its own policy")
    recombinations: int = option(4, "trajectories per generation that a member continues by another member's policy")
    elites: int = option(32, "trajectories in the pool from which all members learn")
    replaced: int = option(2, "members per generation that are replaced by mutated copies of the best")
    mutation: float = option(0.1, "size of a mutation, in standard deviations of each weight tensor")
    temperature: float = option(1.0, "of the trajectories' weights, in standard deviations of the pool's returns")
    hidden: int = option(32, "size of a policy's hidden layer")
    epochs: int = option(2, "passes over a member's sample of the pool in a generation")
    batch_size: int = option(128, "environment steps per update")
    lr: float = option(5e-3, "learning rate of Adam")
    loss_scale: float = option(65536.0, "initial loss scale, in float16")
    address: Optional[str] = option(None, "address of a Ray cluster; by default Ray is started on this machine")
    cpus: int = option(2, "CPUs for Ray if it is started on this machine")
    gpus: float = option(1.0, "GPUs, or the share of one, for a member's task on device cuda")

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
        within(self, rules)
        self.trainer  # noqa: B018

    @property
    def trainer(self) -> FP16TrainingConfig:
        """Return the trainer's settings."""
        return FP16TrainingConfig(enabled=self.fp16_training, on_cpu=self.device == "cpu", loss_scale=self.loss_scale)
