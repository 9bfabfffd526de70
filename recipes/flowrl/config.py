"""FlowRL's settings, ``actor_rollout_ref.actor.flowrl``, checked where verl checks the actor's: in the driver, first of all.

``configs/recipe/flowrl.yaml`` makes :func:`flowrl_actor` what verl builds of ``actor_rollout_ref.actor``.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import OmegaConf

from verl.workers.config import FSDPActorConfig

KEY = "actor_rollout_ref.actor"
# What PPO's loss reads of the actor's config and FlowRL's does not, and what does its work in FlowRL.
UNREAD = {
    "clip_ratio": f"{KEY}.flowrl.importance_clip",
    "clip_ratio_low": f"{KEY}.flowrl.importance_clip",
    "clip_ratio_high": f"{KEY}.flowrl.importance_clip",
    "clip_ratio_c": f"{KEY}.flowrl.importance_clip",
    "entropy_coeff": f"{KEY}.flowrl.beta",
    "kl_loss_coef": f"{KEY}.flowrl.beta, whose inverse is the weight of FlowRL's own KL",
    "kl_loss_type": f"{KEY}.flowrl.beta, whose inverse is the weight of FlowRL's own KL",
    "loss_agg_mode": f"{KEY}.flowrl.length_normalization",
    "loss_scale_factor": f"{KEY}.flowrl.length_normalization",
}


@dataclass(frozen=True)
class PartitionConfig:
    """The head that learns log Z.

    Args:
        lr, weight_decay, clip_grad: of its own AdamW; the actor's schedule scales ``lr`` too.
        dropout: probability in the head.
        zero_init: start from log Z = 0.
        drop_last_prompt_token: leave the prompt's last token out of the mean over its hidden states.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    dropout: float = 0.0
    zero_init: bool = True
    drop_last_prompt_token: bool = False

    def __post_init__(self):
        for name, above in (("lr", True), ("weight_decay", False), ("clip_grad", True)):
            _check_number(f"partition.{name}", getattr(self, name), above)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"{KEY}.flowrl.partition.dropout={self.dropout}: must be at least 0 and below 1")


@dataclass(frozen=True)
class FlowRLConfig:
    """The objective's settings (:mod:`recipes.flowrl.objective`).

    Args:
        beta: inverse temperature of the reward.
        reward: "advantage": GRPO's, normalised by the group, as in the paper; "score": the reward itself, a fixed target.
        log_z: "learned" by the head; "group": the group's mean instead (VarGrad); "none": 0.
        anchor: what the policy is measured against: "ref", or "old", the policy before the update.
        importance_weight: one per "sequence", one per "token" (CISPO), or "none".
        importance_clip: ``[least, largest]`` weight, the largest alone, or ``None``.
        length_normalization: whether log-probabilities are means over an answer's tokens or sums.
        given: what stands elsewhere in verl's config and must fit.
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
        choices = {
            "reward": ("advantage", "score"),
            "log_z": ("learned", "group", "none"),
            "anchor": ("ref", "old"),
            "importance_weight": ("sequence", "token", "none"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{KEY}.flowrl.{name}={getattr(self, name)}: must be one of {', '.join(allowed)}")
        _check_number("beta", self.beta)
        clip = self.importance_clip
        bounds = list(clip) if OmegaConf.is_list(clip) or isinstance(clip, list | tuple) else [0.0, clip]
        if clip is not None:
            if len(bounds) != 2 or not all(_is_number(b) for b in bounds) or not 0 <= bounds[0] < bounds[1]:
                raise ValueError(
                    f"{KEY}.flowrl.importance_clip={clip}: must be [least, largest] with 0 <= least < largest, the "
                    "largest weight alone, or null"
                )
            object.__setattr__(self, "importance_clip", tuple(map(float, bounds)))


@dataclass
class FlowRLActorConfig(FSDPActorConfig):
    """verl's config of an FSDP actor, with FlowRL's settings."""

    flowrl: Optional[FlowRLConfig] = None

    def __post_init__(self):
        super().__post_init__()
        given, flowrl = self.flowrl.given, self.flowrl
        for name, instead in UNREAD.items():
            if getattr(self, name) != FSDPActorConfig.__dataclass_fields__[name].default:
                raise ValueError(
                    f"{KEY}.{name}={getattr(self, name)} is not read by FlowRL: leave it, and set {instead}"
                )
        if self.policy_loss.loss_mode != "vanilla":
            raise ValueError(
                f"{KEY}.policy_loss.loss_mode={self.policy_loss.loss_mode}: FlowRL has its own loss, leave it"
            )
        wanted = {
            "trainer.use_v1": (given["use_v1"], True),
            "trainer.v1.trainer_mode": (given["trainer_mode"], "flowrl"),
            "algorithm.use_kl_in_reward": (given["use_kl_in_reward"], False),
            "distillation.enabled": (given["distillation"], False),
        }
        for name, (value, needed) in wanted.items():
            if value != needed:
                raise ValueError(f"{name}={value}: FlowRL needs {needed}")
        grouped = flowrl.reward == "advantage" or flowrl.log_z == "group"
        if grouped and given["adv_estimator"] != "grpo":
            raise ValueError(f"algorithm.adv_estimator={given['adv_estimator']}: FlowRL needs grpo")
        if grouped and self.rollout_n < 2:
            raise ValueError(
                f"actor_rollout_ref.rollout.n={self.rollout_n}: a group of one has no mean to be measured by; set 2 or "
                f"more, or {KEY}.flowrl.reward=score with log_z=learned or none"
            )
        if flowrl.anchor == "ref" and not self.use_kl_loss:
            raise ValueError(
                f"{KEY}.use_kl_loss=False: no reference policy is loaded, which {KEY}.flowrl.anchor=ref needs; "
                "set True, or anchor=old"
            )

    def validate(self, n_gpus: int, train_batch_size: int, model_config: Optional[dict] = None) -> None:
        super().validate(n_gpus, train_batch_size, model_config)
        if model_config["lora"].get("merge") and self.flowrl.given["rollout_dtype"] in ("float16", "half"):
            raise ValueError(
                "actor_rollout_ref.model.lora.merge=True with actor_rollout_ref.rollout.dtype=float16: adapters are "
                "merged in the trainer's dtype and rounded again for the rollout; set merge=False, or rollout.dtype=auto"
            )


def flowrl_actor(strategy: str, **settings: Any) -> FlowRLActorConfig:
    """What ``actor_rollout_ref.actor._target_`` names.

    Raises:
        ValueError: an engine without a place for the head; a setting that FlowRL cannot use; naming the key.
    """
    if strategy not in ("fsdp", "fsdp2"):
        raise ValueError(f"{KEY}.strategy={strategy}: FlowRL runs with fsdp and fsdp2")
    return FlowRLActorConfig(strategy=strategy, **settings)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_number(name: str, value: Any, above_zero: bool = True) -> None:
    if not _is_number(value) or not (0 < value if above_zero else 0 <= value) or value == float("inf"):
        raise ValueError(f"{KEY}.flowrl.{name}={value}: must be a number {'above' if above_zero else 'of at least'} 0")
