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
"""Send weights from the trainer to the rollout in the rollout's dtype."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from .dtypes import dtype_name, to_dtype
from .roles import REQUESTED_ROLLOUTS


def wire_kwargs(registry: Any, backend: str, engine_kwargs: Mapping[str, Any], rollout_dtype: str) -> Mapping[str, Any]:
    """Return the constructor arguments of a checkpoint engine, with ``rollout_dtype`` where it takes one.

    Args:
        registry: verl's ``CheckpointEngineRegistry``.
        backend: the engine's name there.
        engine_kwargs: the user's ``checkpoint_engine.engine_kwargs``; they win, and a dtype's name becomes the dtype.
        rollout_dtype: ``rollout.dtype``; ``bfloat16``, the engines' own default, and ``auto`` change no argument.

    Raises:
        ValueError: the user's ``rollout_dtype`` is not a dtype to compute in.
    """
    if rollout_dtype not in REQUESTED_ROLLOUTS:
        return engine_kwargs
    kwargs = dict(engine_kwargs)
    if _takes(registry.get(backend), "rollout_dtype"):
        kwargs.setdefault("rollout_dtype", rollout_dtype)
    if "rollout_dtype" in kwargs:
        name = {"half": "float16", "float": "float32"}.get(kwargs["rollout_dtype"], kwargs["rollout_dtype"])
        kwargs["rollout_dtype"] = to_dtype(name, "rollout_dtype")
    return kwargs


def _takes(cls: type, name: str) -> bool:
    """Return whether the constructor takes the argument, itself or by passing ``**kwargs`` on to a base class."""
    for base in cls.__mro__:
        parameters = inspect.signature(base.__init__).parameters
        if name in parameters:
            return True
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return False
    return False


def set_wire_dtype(engine: Any, dtype: torch.dtype) -> None:
    """Set the dtype in which a training engine exports its shards.

    Raises:
        ValueError: the engine exports only bfloat16 and ``dtype`` is another.
    """
    if hasattr(engine, "wire_dtype"):
        engine.wire_dtype = dtype
    elif dtype != torch.bfloat16:
        raise ValueError(
            f"rollout.dtype={dtype_name(dtype)} with checkpoint_engine.backend=delta_sharded: {type(engine).__name__} "
            "exports bfloat16 shards; choose strategy fsdp or fsdp2, another backend, or rollout.dtype=bfloat16"
        )
