"""Settings of a PPO run."""

import math
from dataclasses import dataclass
from typing import Optional

from recipes.amp.options import device, flag, option, within
from recipes.amp.trainer_config import FP16TrainingConfig

KILL_SWITCH = "DISABLE_AMP"
RETURN_WINDOW = 100  # episodes that return_mean is the mean of


@dataclass(frozen=True)
class PPOConfig:
    """All settings of a run; every field is an option of the command line.

    Raises:
        ValueError: naming the key, its value and what is allowed; a malformed ``DISABLE_AMP``.
    """

    env: str = option("CartPole-v1", "Gymnasium's name, or module:name; with Discrete or MultiDiscrete actions")
    out: Optional[str] = option(None, "folder for metrics, checkpoint and figure; a new one unless --resume is given")
    use_amp: bool = option(False, f"autocast to --dtype; {KILL_SWITCH}=1 in the environment overrules it")
    dtype: str = option("float16", "dtype of --use-amp: float16 or bfloat16")
    device: str = option("auto", "auto, cpu or cuda; auto trains in float32 on a CPU")
    compile: bool = option(False, "compile the networks with torch.compile")
    seed: int = option(1, "seed of weights, actions, minibatches and environments")
    total_steps: int = option(150_000, "steps of all environments together, in whole updates of num_envs * num_steps")
    stop_at: Optional[float] = option(None, f"end at this mean return of the last {RETURN_WINDOW} episodes")
    eval_episodes: int = option(100, "episodes of the evaluation after training, by the most probable actions")
    save_every: int = option(50, "updates between checkpoints; the end is always saved")
    resume: bool = option(False, "continue from the checkpoint in --out; the environments are reset")
    num_envs: int = option(32, "number of environments")
    vectorize: str = option("auto", "native (CartPole alone), sync or async; auto: native if there is one, else sync")
    num_steps: int = option(64, "steps of each environment between updates")
    minibatches: int = option(4, "minibatches per epoch")
    epochs: int = option(10, "passes over each batch")
    hidden: int = option(64, "width of the hidden layers")
    layers: int = option(2, "hidden layers of the policy, and of the value network")
    learning_rate: float = option(1e-3, "initial learning rate of Adam")
    anneal: bool = option(True, "decay the learning rate linearly to 0 over total_steps")
    gamma: float = option(0.98, "discount factor per step")
    gae_lambda: float = option(0.9, "lambda of generalised advantages")
    clip: float = option(0.2, "clipping range of the probability ratio")
    entropy_coefficient: float = option(0.0, "weight of the entropy in the objective")
    value_coefficient: float = option(0.5, "weight of the value loss")
    max_grad_norm: float = option(0.5, "clip the unscaled gradients to this L2 norm")
    loss_scale: float = option(65536.0, "initial loss scale, in float16")

    def __post_init__(self):
        batch, each = self.num_envs * self.num_steps, "between 0 and 1"
        counts = ("num_envs", "minibatches", "epochs", "hidden", "layers", "save_every")
        within(
            self,
            {
                "dtype": (self.dtype in ("float16", "bfloat16"), "float16 or bfloat16; float32: without --use-amp"),
                "vectorize": (self.vectorize in ("auto", "native", "sync", "async"), "auto, native, sync or async"),
                "seed": (0 <= self.seed < 2**32, "at least 0 and below 2**32"),
                **{key: (getattr(self, key) >= 1, "at least 1") for key in counts},
                "num_steps": (self.num_steps >= 2, "at least 2: the step after an episode's last is a reset"),
                "total_steps": (self.total_steps >= batch, f"at least num_envs * num_steps = {batch}"),
                "stop_at": (self.stop_at is None or math.isfinite(self.stop_at), "a finite number"),
                "eval_episodes": (self.eval_episodes >= 0, "at least 0"),
                "learning_rate": (0 < self.learning_rate < math.inf, "positive"),
                "gamma": (0 <= self.gamma <= 1, each),
                "gae_lambda": (0 <= self.gae_lambda <= 1, each),
                "clip": (0 < self.clip < 1, each),
                "entropy_coefficient": (0 <= self.entropy_coefficient < math.inf, "at least 0"),
                "value_coefficient": (0 < self.value_coefficient < math.inf, "positive"),
                "resume": (self.out is not None or not self.resume, "unset without --out"),
            },
        )
        parts = f"a divisor of num_envs * num_steps = {batch} into parts of at least 4"
        within(self, {"minibatches": (batch % self.minibatches == 0 and batch // self.minibatches >= 4, parts)})
        self.training(False)
        device(self.device)
        flag(KILL_SWITCH)

    @property
    def updates(self) -> int:
        """Return the number of updates, each on a batch of num_envs * num_steps."""
        return self.total_steps // (self.num_envs * self.num_steps)

    def training(self, amp: bool) -> FP16TrainingConfig:
        """Return the trainer's settings, with autocast enabled or not."""
        return FP16TrainingConfig(
            enabled=amp,
            dtype=self.dtype,
            on_cpu=device(self.device)[1],
            loss_scale=self.loss_scale,
            max_grad_norm=self.max_grad_norm,
        )
