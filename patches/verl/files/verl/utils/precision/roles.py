# Copyright 2026 the verl-precision authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Apply and check the dtype keys of actor, ref, critic and rollout, and tell whether a run requests a precision."""

from collections.abc import Mapping
from typing import Any, Optional

from .dtypes import Precision, check_engine_dtype, dtype_name, join_dtypes, requests_precision

# Each role, and the config of its FSDP engine below it: of verl 0.8.0 and later, and of the workers before.
_ROLES = {
    "actor_rollout_ref.actor": ("fsdp_config",),
    "actor_rollout_ref.ref": ("fsdp_config",),
    "critic": ("fsdp", "model.fsdp_config"),
    "reward_model": ("model.fsdp_config",),
}
# Values of rollout.dtype that request a precision: not bfloat16, verl's default, nor "auto", that of the model's files.
REQUESTED_ROLLOUTS = ("float16", "half", "float32", "float")


def run_requests_precision(config: Mapping[str, Any]) -> bool:
    """Return whether a PPO run requests a precision, so that the checks of its driver are on.

    One of its roles does (:func:`requests_precision`), its rollout does by a ``dtype`` of fp16 or fp32, or
    ``trainer.mismatch_freq`` is on.

    Args:
        config: the composed config of a PPO trainer.

    Raises:
        ValueError: a setting of ``grad_scaler`` is invalid; the message names the role and its key.
    """
    if select(config, "actor_rollout_ref.rollout.dtype") in REQUESTED_ROLLOUTS:
        return True
    freq = select(config, "trainer.mismatch_freq")
    if isinstance(freq, int) and freq > 0:
        return True
    for role, engine_keys in _ROLES.items():
        worker = select(config, role)
        if worker is None:
            continue
        if worker.get("dtype") is not None:
            return True
        for key in (*engine_keys, worker.get("strategy") or "fsdp"):
            try:
                if requests_precision(select(worker, key) or {}):
                    return True
            except ValueError as error:
                raise ValueError(f"{role}.{key}.{error}") from error
    return False


def select(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, ``None`` where there is none."""
    for key in path.split("."):
        config = config.get(key) if config is not None else None
    return config


def apply_engine_dtype(engine_config: Any) -> None:
    """Check what an engine's config requests, and write the dtype that it computes in to its ``dtype``.

    A config without a request stays as it is, unchecked.

    Raises:
        ValueError: as :meth:`Precision.resolve`.
    """
    if not requests_precision(engine_config):
        return
    if str(engine_config.strategy).startswith("fsdp"):
        compute = Precision.resolve(engine_config).compute
    else:
        compute = check_engine_dtype(engine_config.dtype, engine_config.strategy)
    object.__setattr__(engine_config, "dtype", dtype_name(compute))


def apply_role_dtype(dtype: Optional[str], engine_key: str, engine_config: Any) -> None:
    """Make an engine compute in its role's ``dtype``, and check what its config requests.

    Args:
        dtype: the role's key, e.g. ``actor_rollout_ref.actor.dtype``; ``None`` where it is not set.
        engine_key: the engine's key below the role, e.g. ``fsdp_config``.
        engine_config: the engine's config, with its ``dtype`` and ``strategy``.

    Raises:
        ValueError: the role's key and the engine's contradict each other, or the engine cannot train in the dtype.
    """
    joined = join_dtypes(dtype, engine_key, engine_config)
    if dtype is not None:
        object.__setattr__(engine_config, "dtype", joined)
        object.__setattr__(engine_config, "precision_requested", True)
    apply_engine_dtype(engine_config)


def check_master_dtype(role: str, role_config: Any, lora_rank: int) -> None:
    """Refuse, in the driver, half-precision master weights in fp16, which only the base below LoRA adapters may have.

    Args:
        role: e.g. ``actor_rollout_ref.actor``, for the message.
        role_config: an actor's or critic's dataclass, with its ``strategy`` and ``engine``.
        lora_rank: of the role's model; 0 without adapters.

    Raises:
        ValueError: as :meth:`Precision.resolve`.
    """
    if role_config.strategy in ("fsdp", "fsdp2"):
        try:
            Precision.resolve(role_config.engine, lora=lora_rank > 0)
        except ValueError as error:
            raise ValueError(f"{role}: {error}") from error


def check_rollout_dtype(dtype: str) -> None:
    """Refuse a rollout's ``dtype`` that no rollout server accepts.

    Raises:
        ValueError: the message names the value and what is allowed.
    """
    # The names that vLLM and SGLang share; "auto" is the dtype in the model's own config.json.
    allowed = ("auto", "half", "float16", "bfloat16", "float", "float32")
    if dtype not in allowed:
        names = ", ".join(allowed)
        raise ValueError(f"actor_rollout_ref.rollout.dtype={dtype} is unknown to the rollout: choose one of {names}")
