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
"""Report what a worker resolved, with the stamp of the stack it runs on, as one line that tools can parse."""

import json
from pathlib import Path
from typing import Any, Optional

import torch

from .dtypes import dtype_name


def patch_stamp() -> Optional[dict[str, str]]:
    """Return the stamp that ``patchset.py apply`` wrote (``release``, ``stack``, ``tree``), ``None`` without one."""
    stamp = Path(__file__).parents[1] / "precision_stamp.json"
    return json.loads(stamp.read_text()) if stamp.exists() else None


def report(role: str, rank: int, **facts: Any) -> None:
    """Print the facts of a worker as one line of JSON, marked ``[verl-precision]``.

    Args:
        role: actor, ref, critic or rollout.
        rank: the worker's rank in its group.
        facts: JSON values by name, e.g. ``compute="float16"``.
    """
    line = json.dumps({"role": role, "rank": rank, **facts, "stamp": patch_stamp()})
    # One write: the lines of ranks that share an output would run into each other.
    print(f"[verl-precision] {line}\n", end="", flush=True)


def stored_dtypes(module: torch.nn.Module) -> dict[str, str]:
    """Return the dtypes of a sharded model's parameters: the trained ones (``master``), and the first (``base``)."""
    first = next(module.parameters())
    trained = next((parameter for parameter in module.parameters() if parameter.requires_grad), first)
    return {"master": dtype_name(trained.dtype), "base": dtype_name(first.dtype)}
