"""Settings of a world model's training."""

import math
from dataclasses import dataclass

from recipes.amp.options import device, option, within
from recipes.amp.trainer_config import FP16TrainingConfig
from verl.utils.precision import to_dtype

CONTEXT = 10  # observations given by default


@dataclass(frozen=True)
class WorldModelConfig:
    """Settings of the collection of trajectories and of the training on them.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """

    env: str = option("Pendulum-v1", "a Gymnasium environment")
    out: str = option("", "a new folder for the results")
    seed: int = option(0, "seed of the environment, the policy, the weights and the batches")
    device: str = option("auto", "auto, cpu or cuda; auto trains in float32 on a CPU")
    dtype: str = option("float16", "float16, bfloat16 or float32")
    steps: int = option(40000, "environment steps to train on")
    held_out_steps: int = option(4000, "environment steps to evaluate on")
    length: int = option(50, "most steps of a trajectory; a longer episode is split")
    context: int = option(CONTEXT, "observations given to the model before it predicts from the actions alone")
    hidden: int = option(128, "size of the recurrent state and of the hidden layers")
    latent: int = option(32, "size of an encoded observation")
    epochs: int = option(30, "passes over the trajectories")
    batch_size: int = option(16, "trajectories per training step")
    lr: float = option(4e-3, "learning rate of Adam in the first epoch; it falls linearly towards 0")
    loss_scale: float = option(65536.0, "initial loss scale, in float16")

    def __post_init__(self):
        to_dtype(self.dtype, "dtype")
        whole = ("steps", "held_out_steps", "hidden", "latent", "epochs", "batch_size")
        rules = {name: (getattr(self, name) >= 1, "at least 1") for name in whole}
        rules["out"] = (bool(self.out), "a folder: --out DIR")
        rules["seed"] = (0 <= self.seed < 2**31, "from 0 to 2147483647")
        rules["length"] = (self.length >= 2, "at least 2")
        rules["context"] = (1 <= self.context < self.length, f"at least 1 and below length={self.length}")
        rules["lr"] = (0 < self.lr < math.inf, "positive")
        within(self, rules)
        self.trainer  # noqa: B018

    @property
    def trainer(self) -> FP16TrainingConfig:
        """Return the trainer's settings."""
        return FP16TrainingConfig(dtype=self.dtype, on_cpu=device(self.device)[1], loss_scale=self.loss_scale)
