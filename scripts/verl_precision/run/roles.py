"""Name the roles of a job and the settings of their engines."""

import sys
from typing import TYPE_CHECKING

from verl_precision.paths import REPO

if TYPE_CHECKING:
    from omegaconf import DictConfig


def used_roles(config: "DictConfig") -> "dict[str, DictConfig]":
    """Return the settings of the actor, and of the ref and the critic where the job uses them."""
    sys.path.append(str(REPO))  # for the recipes that verl imports
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    roles = {"actor": config.actor_rollout_ref.actor}
    roles |= {"ref": config.actor_rollout_ref.ref} if need_reference_policy(config) else {}
    return roles | ({"critic": config.critic} if need_critic(config) else {})


def engine_settings(role: "DictConfig") -> dict:
    """Return the settings of a role's engine that decide its precision, by verl's names, and ``role_dtype``."""
    of_role = {"role_dtype": role.get("dtype")}
    if not role.strategy.startswith("fsdp"):
        return of_role | {"dtype": role[role.strategy].dtype}
    engine = role["fsdp_config" if "fsdp_config" in role else "fsdp"]
    # mixed_precision may be missing
    return of_role | {key: engine.get(key) for key in ("dtype", "mixed_precision", "model_dtype")}
