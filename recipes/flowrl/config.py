"""Define FlowRL's settings, ``actor_rollout_ref.actor.flowrl``, and check them in the driver with the actor's.

``configs/recipe/flowrl.yaml`` sets ``actor_rollout_ref.actor._target_`` to :func:`flowrl_actor`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Optional

from verl.workers.config import FSDPActorConfig

KEY = "actor_rollout_ref.actor"
CHOICES = {
    "reward": ("advantage", "score"),
    "log_z": ("learned", "group", "none"),
    "anchor": ("ref", "old"),
    "importance_weight": ("sequence", "token", "none"),
}
# Keys of the actor that PPO's loss reads and FlowRL's does not.
UNUSED_KEYS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "entropy_coeff", "calculate_entropy")
UNUSED_KEYS += ("kl_loss_coef", "kl_loss_type", "loss_agg_mode", "loss_scale_factor")


@dataclass(frozen=True)
class PartitionConfig:
    """Settings of the head that learns log Z.

    Args:
        lr, weight_decay, clip_grad: of the head's own AdamW; the actor's schedule scales ``lr``.
        dropout: probability in the head.
        zero_init: start from log Z = 0.
        drop_last_prompt_token: exclude the prompt's last token from the mean over its hidden states.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    dropout: float = 0.0
    zero_init: bool = True
    drop_last_prompt_token: bool = False

    def __post_init__(self):
        key = f"{KEY}.flowrl.partition"
        _check_fields(key, self, may_be_zero=("weight_decay", "dropout"))
        _require(self.dropout < 1, f"{key}.dropout", self.dropout, "must be below 1")


@dataclass(frozen=True)
class FlowRLConfig:
    """Settings of the objective (:mod:`recipes.flowrl.objective`).

    Args:
        beta: inverse temperature of the reward.
        reward: "advantage": GRPO's, normalised by the group, as in the paper; "score": the reward itself.
        log_z: "learned" by the head; "group": the mean of the group (VarGrad); "none": 0.
        anchor: the reference policy πref: "ref", or "old", the policy before the update.
        importance_weight: one per "sequence", one per "token" (CISPO), or "none".
        importance_clip: ``[least, largest]`` weight, only the largest, or ``None``.
        length_normalization: whether log-probabilities are averaged or summed over an answer's tokens.
        given: values of other keys of verl's config that must be compatible.
    """

    beta: float = 15.0
    reward: str = "advantage"
    log_z: str = "learned"
    anchor: str = "ref"
    importance_weight: str = "sequence"
    importance_clip: Any = (0.8, 1.28)
    length_normalization: bool = True
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    given: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        key, clip = f"{KEY}.flowrl", self.importance_clip
        _check_fields(key, self)
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            _require(value in allowed, f"{key}.{name}", value, f"must be one of {', '.join(allowed)}")
        bounds = clip if isinstance(clip, Sequence) else (0.0, math.inf if clip is None else clip)
        fits = len(bounds) == 2 and all(map(_is_number, bounds)) and 0 <= bounds[0] <= 1 <= bounds[1] > bounds[0]
        allowed = "must be [least, largest] with 0 <= least <= 1 <= largest, only the largest, or null"
        _require(fits, f"{key}.importance_clip", clip, allowed)
        object.__setattr__(self, "importance_clip", tuple(map(float, bounds)))


@dataclass
class FlowRLActorConfig(FSDPActorConfig):
    """verl's config of an FSDP actor with FlowRL's settings."""

    flowrl: Optional[FlowRLConfig] = None

    def __post_init__(self):
        super().__post_init__()
        flowrl, given = self.flowrl, self.flowrl.given
        for name in UNUSED_KEYS:
            value, default = getattr(self, name), FSDPActorConfig.__dataclass_fields__[name].default
            reason = f"is not read by FlowRL; leave it at {default} and set {KEY}.flowrl (configs/recipe/flowrl.yaml)"
            _require(value == default, f"{KEY}.{name}", value, reason)
        loss = self.policy_loss.loss_mode
        _require(loss == "vanilla", f"{KEY}.policy_loss.loss_mode", loss, "FlowRL has its own loss; keep vanilla")
        grouped = flowrl.reward == "advantage" or flowrl.log_z == "group"
        for key, value, needed in (
            ("trainer.use_v1", given["use_v1"], True),
            ("trainer.v1.trainer_mode", given["trainer_mode"], "flowrl"),
            ("algorithm.use_kl_in_reward", given["use_kl_in_reward"], False),
            ("distillation.enabled", given["distillation"], False),
            ("algorithm.adv_estimator", given["adv_estimator"] if grouped else "grpo", "grpo"),
        ):
            _require(value == needed, key, value, f"FlowRL needs {needed}")
        reason = f"a group of one has no mean; set 2 or more, or {KEY}.flowrl.reward=score with log_z=learned or none"
        _require(self.rollout_n > 1 or not grouped, "actor_rollout_ref.rollout.n", self.rollout_n, reason)
        reason = f"{KEY}.flowrl.anchor=ref needs the reference policy; set true, or anchor=old"
        _require(self.use_kl_loss or flowrl.anchor == "old", f"{KEY}.use_kl_loss", self.use_kl_loss, reason)

    def validate(self, n_gpus: int, train_batch_size: int, model_config: Optional[dict] = None) -> None:
        super().validate(n_gpus, train_batch_size, model_config)
        dtype = self.flowrl.given["rollout_dtype"]
        rounded_twice = model_config["lora"].get("merge") and dtype in ("float16", "half")
        reason = f"adapters merged in the trainer's dtype are rounded again for rollout.dtype={dtype}; set merge=false"
        _require(not rounded_twice, "actor_rollout_ref.model.lora.merge", True, reason)


def flowrl_actor(strategy: str, **settings: Any) -> FlowRLActorConfig:
    """Build the actor's config; the ``_target_`` of ``actor_rollout_ref.actor``.

    Raises:
        ValueError: the strategy does not support the head, or FlowRL cannot use a setting; the message names the key.
    """
    _require(strategy in ("fsdp", "fsdp2"), f"{KEY}.strategy", strategy, "FlowRL requires fsdp or fsdp2")
    return FlowRLActorConfig(strategy=strategy, **settings)


def _check_fields(key: str, settings: Any, may_be_zero: tuple[str, ...] = ()) -> None:
    """Check the types of all fields, and that numbers are positive."""
    for each in fields(settings):
        value, zero = getattr(settings, each.name), each.name in may_be_zero
        if each.type is bool:
            _require(isinstance(value, bool), f"{key}.{each.name}", value, "must be true or false")
        elif each.type is float:
            fits = _is_number(value) and (0 < value < math.inf or (zero and value == 0))
            _require(fits, f"{key}.{each.name}", value, f"must be a number above 0{', or 0' if zero else ''}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(fits: bool, key: str, value: Any, allowed: str) -> None:
    if not fits:
        raise ValueError(f"{key}={value}: {allowed}")
