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

from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

__all__ = ["adapted_weights", "merge_in_fp32", "merged_weights"]


def adapted_weights(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the LoRA layers of a sharded peft model by the ``state_dict`` name of the weight that each adapts.

    Args:
        module: the peft model, under FSDP1 or FSDP2.

    Returns:
        LoRA layers by names such as ``….q_proj.base_layer.weight``, without the prefixes of FSDP's wrappers.
    """
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
        weight: the whole weight of the base, in its dtype: ``(out, in)``, of experts ``(experts, out, in)``.
        layer: None if no adapter belongs to the weight.

    Returns:
        fp32, of the shape and on the device of ``weight``.

    Raises:
        ValueError: the adapter is a DoRA, which scales the weight as well; or an FSDP1 unit around the layer contains
            the adapter, which cannot be gathered from it here.
    """
    merged = weight.to(torch.float32, copy=True)
    if layer is None:
        return merged
    if len(layer.lora_magnitude_vector):
        raise ValueError("lora.merge=true adds adapters to the weights, which a DoRA scales too: set lora.merge=false")
    for adapter in layer.active_adapters:
        down = layer.lora_A[adapter]
        if not isinstance(down, FullyShardedDataParallel) and not isinstance(down.weight, DTensor):
            raise ValueError(
                "lora.merge=true gathers adapters from FSDP units of their own: set wrap_policy.min_num_params=0 and "
                "wrap_policy.disable=false in the FSDP engine's config, or lora.merge=false"
            )
    with FullyShardedDataParallel.summon_full_params(layer, writeback=False):  # its adapters; the base is not in them
        for adapter in layer.active_adapters:
            delta = layer.get_delta_weight(adapter).to(merged.device)  # offload_policy keeps adapters on the CPU
            merged += delta.full_tensor() if isinstance(delta, DTensor) else delta
    return merged


def merged_weights(engine: Any, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a LoRA engine's model for the rollout, with its adapters merged, in fp32; every rank must.

    Args:
        engine: verl's FSDP engine, whose parameters are offloaded again at the end, if it offloads them.
        device: where each weight is gathered.

    Raises:
        ValueError: as :func:`merge_in_fp32`.
    """
    from verl.utils.fsdp_utils import normalize_peft_param_name, offload_fsdp_model_to_cpu
    from verl.utils.model import convert_weight_keys

    model = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
    try:
        params, adapted = (
            convert_weight_keys(normalize_peft_param_name(by_name), model)
            for by_name in (engine.module.state_dict(), adapted_weights(engine.module))
        )
        for name, param in params.items():
            whole = param.to(device, non_blocking=True).full_tensor() if isinstance(param, DTensor) else param
            yield name, merge_in_fp32(whole, adapted.get(name))
    finally:
        if engine.is_param_offload_enabled:
            offload_fsdp_model_to_cpu(engine.module)
