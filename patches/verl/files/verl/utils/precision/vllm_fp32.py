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
"""Keep routers and the head in fp32 in vLLM, where the trainer keeps them in fp32."""

import functools
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Optional

import torch
from torch.torch_version import TorchVersion

from .dtypes import dtype_name
from .keep_fp32 import star

_KEY = "keep_fp32_modules"
_HEAD = "lm_head"
_READS_HEAD_DTYPE = "0.28"  # https://github.com/vllm-project/vllm/pull/48390; earlier ones read it for pooling models


def args_with_fp32_modules(
    args: Mapping[str, Any], patterns: Optional[Sequence[str]], vllm_version: str
) -> dict[str, Any]:
    """Return vLLM's arguments with ``patterns`` in ``additional_config``, and the head in fp32 if they name it.

    vLLM carries this dictionary to its workers, and its value is part of the key of vLLM's compile cache. The head's
    weights stay in the rollout's dtype. A ``head_dtype`` that the user sets in ``hf_overrides`` wins.

    Args:
        args: the server's arguments, ``rollout.engine_kwargs.vllm`` included.
        patterns: ``rollout.keep_fp32_modules``; ``None`` where the actor has no such key, as under Megatron.
        vllm_version: version of the installed vLLM.

    Raises:
        ValueError: ``patterns`` names the head, and this vLLM cannot compute it in fp32.
    """
    if not patterns:
        return dict(args)
    changed = {**args, "additional_config": (args.get("additional_config") or {}) | {_KEY: list(patterns)}}
    if any(fnmatchcase(_HEAD, pattern) for pattern in patterns):
        if TorchVersion(vllm_version) < _READS_HEAD_DTYPE:  # compares as packaging's Version
            raise ValueError(
                f"rollout.{_KEY}={list(patterns)}: vLLM {vllm_version} cannot compute {_HEAD} in fp32. Install vLLM "
                f"{_READS_HEAD_DTYPE} or later, remove {_HEAD} from the actor's fsdp_config.{_KEY}, which this key "
                f"follows, or set rollout.{_KEY}=[] to have {_HEAD} in fp32 in the trainer only"
            )
        changed["hf_overrides"] = {"head_dtype": "float32"} | dict(args.get("hf_overrides") or {})
    return changed


def keep_routers_in_fp32(linear: type[torch.nn.Module], vllm_config: Any) -> None:
    """Make the routers that ``keep_fp32_modules`` names have fp32 weights and scores.

    Call it before vLLM builds the model: the weights are created in fp32, so that a checkpoint, a weight update,
    profiling and graph capture all find them so. A router is a replicated linear layer with a row of weights for each
    expert, which is named or inside a named module. Layers in a quantized model stay as they are.

    Args:
        linear: vLLM's ``ReplicatedLinear``, whose subclasses include ``GateLinear``.
        vllm_config: the worker's ``VllmConfig``, if it has one.
    """
    config = getattr(vllm_config, "additional_config", None)
    patterns = config.get(_KEY, []) if isinstance(config, dict) else []
    if not patterns or vllm_config.quant_config is not None:
        return
    experts = vllm_config.model_config.get_num_experts()
    construct, compute = linear.__init__, linear.forward

    @functools.wraps(construct)
    def construct_in_fp32(self, input_size, output_size, *args, prefix: str = "", **kwargs):
        parts = prefix.split(".")
        names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if output_size == experts and any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            kwargs["params_dtype"] = torch.float32
        construct(self, input_size, output_size, *args, prefix=prefix, **kwargs)

    @functools.wraps(compute)
    def compute_in_dtype_of_weight(self, x):
        return compute(self, x.float() if self.params_dtype == torch.float32 else x)

    linear.__init__, linear.forward = construct_in_fp32, compute_in_dtype_of_weight


def fp32_parameters(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the report's entry on the parameters in fp32 where the model is in 16 bits; empty if there are none."""
    parameters = dict(model.named_parameters())
    names = list(dict.fromkeys(star(name) for name, value in parameters.items() if value.dtype == torch.float32))
    return {"fp32": names} if names and len(names) < len(set(map(star, parameters))) else {}


def head_dtype(model_config: Any) -> dict[str, str]:
    """Return the report's entry on a head that computes in another dtype than the model; empty if there is none."""
    head = getattr(model_config, "head_dtype", model_config.dtype)  # earlier vLLMs have no such property
    return {"head": dtype_name(head)} if head != model_config.dtype else {}
