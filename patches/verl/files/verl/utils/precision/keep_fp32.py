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
"""Keep named modules of a model in fp32 under FSDP, whatever the rest computes in (``keep_fp32_modules``)."""

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Optional

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map


def check_keep_fp32(patterns: Any, strategy: Optional[str]) -> None:
    """Refuse a ``keep_fp32_modules`` that is not a list of names, or that the engine would ignore.

    Raises:
        ValueError: the message names the key, its value and what is allowed.
    """
    if (
        not isinstance(patterns, Sequence)
        or isinstance(patterns, str)
        or not all(isinstance(pattern, str) for pattern in patterns)
    ):
        raise ValueError(f"keep_fp32_modules={patterns} must be a list of module names or patterns, e.g. [lm_head]")
    if patterns and strategy not in ("fsdp", "fsdp2"):
        raise ValueError(f"keep_fp32_modules={patterns} is not read by strategy={strategy}: choose fsdp or fsdp2")


def keep_in_fp32(
    model: torch.nn.Module,
    patterns: Iterable[str],
    compute: torch.dtype,
    device: str,
    fused_head: bool = False,
) -> dict[str, torch.nn.Module]:
    """Make the modules that match ``patterns`` compute in fp32, whatever surrounds them.

    Their inputs are cast to fp32, autocast is off inside, and their outputs are cast back to ``compute``, so that
    nothing else changes. A head (``lm_head``, ``score``: a child of the model itself) returns fp32, because nothing of
    the model follows it. Call this before FSDP wraps the model; :func:`fp32_wrap_policy` or :func:`shard_in_fp32` then
    gathers their parameters in fp32.

    Args:
        patterns: Hugging Face names such as ``lm_head``, or fnmatch patterns (``*`` matches dots too). All of a
            kept module is in fp32.
        compute: dtype that the rest of the model computes in.
        device: device type of the autocast around the model (cuda, cpu, …).
        fused_head: whether fused kernels read the head's weight without calling the head.

    Returns:
        The outermost kept modules by name.

    Raises:
        ValueError: a pattern matches nothing, or a module cannot be kept apart; the message names it and the reason.
    """
    # peft puts two modules around the model.
    modules = {name.removeprefix("base_model.model."): module for name, module in model.named_modules() if name}
    matched: set[str] = set()
    for pattern in patterns:
        hits = {name for name in modules if fnmatchcase(name, pattern)}
        if not hits:
            # All layers are alike: "model.layers.*.mlp" is offered once, not once a layer.
            star = functools.partial(re.sub, r"\.\d+(?=\.|$)", ".*")
            near = difflib.get_close_matches(star(pattern), {star(name) for name in modules}, n=3, cutoff=0.0)
            raise ValueError(
                f"keep_fp32_modules: {pattern} matches no module of {type(model).__name__}; near it: {', '.join(near)}"
            )
        matched |= hits
    inside_another = {name for name in matched for outer in matched if name.startswith(f"{outer}.")}
    kept = {name: module for name, module in modules.items() if name in matched - inside_another}

    blocks = set(model._no_split_modules or ()) if kept else set()
    for name, module in kept.items():
        within = set(module.modules())
        weights = set(module.parameters())
        sharers = [
            other
            for other, outside in modules.items()
            if outside not in within and not weights.isdisjoint(outside.parameters(recurse=False))
        ]
        if any(type(part).__name__ in blocks for part in within - {module}):
            why = "it contains whole transformer blocks; name modules within them, or set dtype=float32"
        elif type(module).forward is torch.nn.Module.forward:
            why = f"it is a {type(module).__name__}, which is never called; name the modules in it"
        elif sharers:
            why = f"it shares a weight with {sharers[0]}, which FSDP cannot gather in two dtypes (tie_word_embeddings)"
        elif fused_head and module is model.get_output_embeddings():
            why = "fused kernels read its weight without calling it; set model.use_fused_kernels=false"
        elif _attends(within) and "flash" in (model.config._attn_implementation or ""):
            why = "flash attention has no fp32; set model.override_config.attn_implementation=sdpa"
        else:
            continue
        raise ValueError(f"keep_fp32_modules: {name} cannot be kept in fp32: {why}")
    for name, module in kept.items():
        _compute_in_fp32(module, returns=compute if "." in name else torch.float32, device=device)
    return kept


def _attends(modules: Iterable[torch.nn.Module]) -> bool:
    return any(type(module).__name__.endswith("Attention") for module in modules)


def _compute_in_fp32(module: torch.nn.Module, returns: torch.dtype, device: str) -> None:
    """Wrap the module's ``forward``; a wrapper module would change the names of its parameters."""

    def cast(tree: Any, dtype: torch.dtype) -> Any:
        return tree_map(lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x, tree)

    forward = module.forward

    @functools.wraps(forward)
    def in_fp32(*args, **kwargs):
        with torch.autocast(device, enabled=False):
            return cast(forward(*cast(args, torch.float32), **cast(kwargs, torch.float32)), returns)

    module.forward = in_fp32


def fp32_wrap_policy(
    policy: Optional[Callable[..., bool]], kept: Mapping[str, torch.nn.Module], mixed_precision: Any
) -> Optional[Callable[..., bool]]:
    """Return FSDP1's ``auto_wrap_policy`` that also wraps each kept module by itself, with its parameters in fp32.

    Args:
        policy: the policy for all other modules.
        kept: the result of :func:`keep_in_fp32`.
        mixed_precision: FSDP1's ``MixedPrecision`` of all other modules.
    """
    if not kept:
        return policy
    for module in kept.values():
        for part in module.modules():  # under LoRA the policy wraps adapters by themselves
            # What torch itself sets where a policy is a function, to leave batch norms in fp32.
            part._wrap_overrides = {"mixed_precision": replace(mixed_precision, param_dtype=torch.float32)}
    modules = set(kept.values())

    def fp32_or_policy(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        wanted = not modules.isdisjoint(module.modules()) if recurse else module in modules
        return wanted or (policy is not None and policy(module, recurse, nonwrapped_numel))

    return fp32_or_policy


def shard_in_fp32(kept: Mapping[str, torch.nn.Module], fsdp_kwargs: Mapping[str, Any]) -> None:
    """Shard each kept module by itself under FSDP2, with its parameters in fp32; call before the rest is sharded.

    Args:
        kept: the result of :func:`keep_in_fp32`.
        fsdp_kwargs: ``fully_shard``'s arguments for all other modules.
    """
    for module in kept.values():
        mp_policy = replace(fsdp_kwargs["mp_policy"], param_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(module, **{**fsdp_kwargs, "mp_policy": mp_policy})
