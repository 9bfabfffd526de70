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
"""Send LoRA adapters to the rollout: refuse an empty one, and offload the base before the rollout wakes up.

Offloaded, a GPU has room for one of the two bases. verl copies the adapters, or an unmerged base, to the host and sends
them from there. The trainer's weights need to be on the GPU only for that copy.
"""

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["check_adapter", "weights_before_wake_up"]


def weights_before_wake_up(worker: Any) -> Callable[..., tuple[Any, Any]]:
    """Return ``get_per_tensor_param`` of a worker's engine; for unmerged LoRA with ``param_offload`` its saved results.

    Args:
        worker: an ``ActorRolloutRefWorker`` of the model engine whose rollout sleeps.
    """
    engine = worker.actor.engine
    if worker.peft_merge or not (engine.model_config.lora_rank and engine.is_param_offload_enabled):
        return engine.get_per_tensor_param
    results = {
        base_sync_done: engine.get_per_tensor_param(layered_summon=worker.layered_summon, base_sync_done=base_sync_done)
        for base_sync_done in {True, worker.base_sync_done}
    }
    return lambda layered_summon, base_sync_done: results[base_sync_done]


def check_adapter(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return ``tensors``, a LoRA adapter about to be sent to the rollout, unless it is empty.

    Raises:
        ValueError: it is empty; vLLM's worker would die on it and the trainer would wait forever.
    """
    if not tensors:
        raise ValueError(
            f"LoRA: peft {importlib.metadata.version('peft')} returned an empty adapter for the rollout; peft finds no "
            "tensors in a nested FSDP1 model from 0.21.0 on: install peft==0.20.0"
        )
    return tensors
