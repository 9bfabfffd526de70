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
"""Merge LoRA adapters into the weights that are sent to the rollout, in fp32 and without changing the model."""

from typing import Optional

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

__all__ = ["adapted_weights", "merge_in_fp32"]


def adapted_weights(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the LoRA layers of a sharded peft model by the ``state_dict`` name of the weight that each adapts."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper  # peft 0.17 and later; nothing but a merge needs it

    return {
        f"{name.replace('_fsdp_wrapped_module.', '')}.base_layer."
        + (layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"): layer
        for name, layer in module.named_modules()
        if isinstance(layer, LoraLayer)
    }


@torch.no_grad()
def merge_in_fp32(weight: torch.Tensor, layer: Optional[torch.nn.Module]) -> torch.Tensor:
    """Return a copy of ``weight`` with the adapters of its LoRA layer added, in fp32; every rank must call it.

    The model keeps its weights: adding to them in place would round the sum to the dtype of a 16-bit base.

    Args:
        weight: the whole weight of the base.
        layer: None if no adapter belongs to the weight.

    Raises:
        ValueError: the adapter is a DoRA, which scales the weight as well.
    """
    merged = weight.to(torch.float32, copy=True)
    if layer is None:
        return merged
    if len(layer.lora_magnitude_vector):
        raise ValueError("lora.merge=true adds adapters to the weights, which a DoRA scales too: set lora.merge=false")
    with FullyShardedDataParallel.summon_full_params(layer, writeback=False):  # its adapters; the base is not in them
        for adapter in layer.active_adapters:
            delta = layer.get_delta_weight(adapter)
            merged += delta.full_tensor() if isinstance(delta, DTensor) else delta
    return merged
