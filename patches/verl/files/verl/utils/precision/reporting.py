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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Optional

import torch

from .dtypes import Precision, dtype_name
from .roles import REQUESTED_ROLLOUTS
from .vllm_fp32 import fp32_parameters, head_dtype


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


def report_worker(
    role: str,
    rank: int,
    strategy: str,
    precision: Precision,
    module: torch.nn.Module,
    facts: Optional[Mapping[str, Any]] = None,
) -> None:
    """Print what a training worker resolved and the dtypes of its weights, where its precision is to be reported.

    Args:
        role: actor, ref, critic or reward_model.
        rank: the worker's rank in its group.
        strategy: fsdp or fsdp2.
        module: the sharded model.
        facts: further JSON values by name.
    """
    if precision.reported:
        report(role, rank, strategy=strategy, **{**precision.names(), **stored_dtypes(module)}, **(facts or {}))


def report_kwargs(rollout_config: Mapping[str, Any]) -> dict[str, bool]:
    """Return the argument with which a vLLM worker prints its dtypes once; nothing where no precision is requested.

    ``rollout.report_dtypes`` decides: it is the actor's ``dtype`` until set. Without it, ``rollout.dtype`` does.
    """
    wanted = rollout_config.get("report_dtypes")
    if wanted is None:
        wanted = rollout_config["dtype"] in REQUESTED_ROLLOUTS
    return {"report_dtypes": True} if wanted else {}


def report_rollout(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Print the dtypes of a vLLM worker, once: of the weights that arrive, of those that it runs, of its KV cache.

    Args:
        worker: verl's extension of vLLM's worker.
        weights: the first that arrive.
    """
    worker._report_dtypes, worker._dtypes_reported = False, True
    _, first = next(iter(weights))
    model = worker.model_runner.model
    report(
        "rollout",
        worker.rank,
        strategy="vllm",
        wire=dtype_name(first.dtype),
        rollout=dtype_name(next(model.parameters()).dtype),
        kv_cache=dtype_name(worker.model_runner.kv_cache_dtype),
        **fp32_parameters(model),
        **head_dtype(worker.model_runner.vllm_config.model_config),
    )
