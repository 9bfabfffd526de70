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
        within(self, rules)
        self.trainer  # noqa: B018

    @property
    def trainer(self) -> FP16TrainingConfig:
        """Return the trainer's settings."""
        return FP16TrainingConfig(enabled=self.fp16_training, on_cpu=self.device == "cpu", loss_scale=self.loss_scale)
