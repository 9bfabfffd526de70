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
"""Check the dtype keys of actor, ref, critic and rollout."""

from typing import Any, Optional

from .dtypes import Precision, check_engine_dtype, to_dtype


def check_role_dtype(dtype: Optional[str], engine_key: str, engine_config: Any) -> None:
    """Refuse a role's ``dtype`` that its engine's own key contradicts, or that its engine cannot train in.

    Args:
        dtype: the role's key, e.g. ``actor_rollout_ref.actor.dtype``; ``None`` where it is not set.
        engine_key: the engine's key below the role, e.g. ``fsdp_config``.
        engine_config: the engine's config, with its ``dtype`` and ``strategy`` resolved.

    Raises:
        ValueError: both are set and differ, or the engine would ignore the dtype.
    """
    if dtype is not None and to_dtype(dtype, "dtype") != to_dtype(engine_config.dtype, f"{engine_key}.dtype"):
        raise ValueError(
            f"dtype={dtype} and {engine_key}.dtype={engine_config.dtype} contradict each other: "
            f"set dtype alone, which {engine_key}.dtype follows (the dtype of ref and critic is the actor's until set)"
        )
    check_engine_dtype(engine_config.dtype, engine_config.strategy)


def check_master_dtype(role: str, role_config: Any, lora_rank: int) -> None:
    """Refuse, in the driver, half-precision master weights in fp16, which the base below LoRA adapters alone may have.

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
        raise ValueError(f"dtype={dtype} is unknown to the rollout: choose one of {', '.join(allowed)}")
