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
"""Keep modules of a model in fp32 under FSDP, whatever the rest computes in.

These are the modules that ``keep_fp32_modules`` names, and those that the model's class lists itself
(``_keep_in_fp32_modules``, ``_keep_in_fp32_modules_strict``), which transformers honours only when it loads weights.
"""

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MappingProxyType
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


class KeptModules(dict[str, torch.nn.Module]):
    """The outermost modules that compute in fp32 and whose parameters FSDP gathers in fp32, by name.

    Attributes:
        heads: name of the language model's head, which computes in fp32 from weights in the compute dtype.
        declined: what the model's class lists and is not in fp32, with the reason.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module] = MappingProxyType({})):
        super().__init__(modules)
        self.heads: list[str] = []
        self.declined: dict[str, str] = {}

    def names(self) -> dict[str, Any]:
        """Return the entries of the worker's report, with ``*`` for the number of a layer; empty if there are none."""
        kept = list(dict.fromkeys(map(star, [*self, *self.heads])))
        declined = {star(name): why for name, why in self.declined.items()}
        return ({"keep_fp32": kept} if kept else {}) | ({"not_kept_fp32": declined} if declined else {})


def star(name: str) -> str:
    """Replace the numbers of layers and experts by ``*``: ``model.layers.0.mlp`` -> ``model.layers.*.mlp``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def keep_in_fp32(
    model: torch.nn.Module,
    patterns: Iterable[str],
    compute: torch.dtype,
    device: str,
    fused_head: bool = False,
    buffers: torch.dtype = torch.float32,
) -> KeptModules:
    """Make the modules that match ``patterns``, or that the model's class lists, compute in fp32.

    Their inputs are cast to fp32, autocast is off inside, and their outputs are cast back to ``compute``, so that
    nothing else changes. A head (``lm_head``, ``score``: a child of the model itself) returns fp32, because nothing of
    the model follows it; so does a router, whose scores choose and weigh the experts. Call this before FSDP wraps the
    model; :func:`fp32_wrap_policy` or :func:`shard_in_fp32` then gathers their parameters in fp32.

    The language model's head casts its weight in each forward pass instead, as vLLM does under ``head_dtype``: both
    then multiply the same rounded weight, and it may be the embedding's (``tie_word_embeddings``).

    Args:
        patterns: Hugging Face names such as ``lm_head``, or fnmatch patterns (``*`` matches dots too). All of a
            kept module is in fp32.
        compute: dtype that the rest of the model computes in.
        device: device type of the autocast around the model (cuda, cpu, …).
        fused_head: whether fused kernels read the head's weight without calling the head.
        buffers: dtype of the model's buffers in forward and backward.

    Returns:
        The outermost kept modules. What the class lists and cannot be kept apart is in ``declined``.

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
            near = difflib.get_close_matches(star(pattern), {star(name) for name in modules}, n=3, cutoff=0.0)
            raise ValueError(
                f"keep_fp32_modules: {pattern} matches no module of {type(model).__name__}; near it: {', '.join(near)}"
            )
        matched |= hits
    outermost = _outermost(matched)
    kept = KeptModules({name: module for name, module in modules.items() if name in outermost})
    for name, module in kept.items():
        if why := _obstacle(model, modules, module, fused_head):
            raise ValueError(f"keep_fp32_modules: {name} cannot be kept in fp32: {why}")

    owners, kept.declined = _listed_modules(model, modules, compute, buffers)
    listed = _outermost(owners | set(kept)) - set(kept)
    for name, module in modules.items():  # in the order of every rank
        if name not in listed:
            continue
        if why := _obstacle(model, modules, module, fused_head):
            kept.declined[name] = why
        else:
            kept[name] = module
    for name in [name for name, module in kept.items() if module is model.get_output_embeddings()]:
        _cast_linears(kept.pop(name), device)
        kept.heads.append(name)
    for name, module in kept.items():
        in_fp32 = "." not in name or _routes(modules, name)
        _compute_in_fp32(module, returns=torch.float32 if in_fp32 else compute, device=device)
    return kept


def _outermost(names: Iterable[str]) -> set[str]:
    return {name for name in names if not any(name.startswith(f"{outer}.") for outer in names)}


def listed_in_fp32(model: torch.nn.Module, compute: torch.dtype) -> list[str]:
    """Return the parameters and buffers that the model's class keeps in fp32 where the rest is in ``compute``.

    They are those that transformers 5 leaves in fp32 when it loads a checkpoint: ``_keep_in_fp32_modules`` applies to
    float16, ``_keep_in_fp32_modules_strict`` to bfloat16, too; each entry is searched for in the name, ``*`` matches
    any text.
    """
    attributes = ["_keep_in_fp32_modules_strict"] if compute in (torch.float16, torch.bfloat16) else []
    attributes += ["_keep_in_fp32_modules"] if compute == torch.float16 else []
    # A wrapper such as peft's, and transformers before 4.51, lack the attributes.
    entries = {entry for part in model.modules() for name in attributes for entry in getattr(part, name, None) or ()}
    listed = re.compile("|".join(entry.replace("*", ".*") for entry in sorted(entries)))
    tensors = model.state_dict().items() if entries else ()
    names = [name for name, tensor in tensors if tensor.is_floating_point() and listed.search(name)]
    return [name.removeprefix("base_model.model.") for name in names]


def _listed_modules(
    model: torch.nn.Module, modules: Mapping[str, torch.nn.Module], compute: torch.dtype, buffers: torch.dtype
) -> tuple[set[str], dict[str, str]]:
    """Return the modules that own what the class lists, and what of it cannot be kept apart, with the reason."""
    listed = listed_in_fp32(model, compute)
    owners: set[str] = set()
    declined: dict[str, str] = {}
    for name in listed:
        owner, _, own = name.rpartition(".")
        module = modules.get(owner, model)  # the model itself has no name
        beside = [f"{owner}.{other}" for other, _ in module.named_parameters()]
        if own in dict(module.named_buffers(recurse=False)):
            if buffers != torch.float32:
                declined[name] = f"FSDP1 casts buffers to {buffers}; set mixed_precision.buffer_dtype=fp32"
        elif others := [other for other in beside if other not in listed]:
            declined[name] = f"it is in one module with {star(others[0])}, which is not listed"
        else:
            owners.add(owner)
    return owners, declined


def _obstacle(
    model: torch.nn.Module, modules: Mapping[str, torch.nn.Module], module: torch.nn.Module, fused_head: bool
) -> Optional[str]:
    """Return why FSDP cannot gather the module in fp32, ``None`` if it can."""
    blocks = set(model._no_split_modules or ())
    within, weights = set(module.modules()), set(module.parameters())
    sharers = [
        other
        for other, outside in modules.items()
        if outside not in within and not weights.isdisjoint(outside.parameters(recurse=False))
    ]
    if any(type(part).__name__ in blocks for part in within - {module}):
        return "it contains whole transformer blocks; name modules within them, or set dtype=float32"
    if type(module).forward is torch.nn.Module.forward:
        return f"it is a {type(module).__name__}, which is never called; name the modules in it"
    if experts := [name for name, each in modules.items() if _calls_some(name, each) and module in set(each.modules())]:
        return f"it is in one of {experts[0]}, which a rank calls only with tokens for it; name routers instead"
    if sharers and module is not model.get_output_embeddings():
        return f"it shares a weight with {sharers[0]}, which FSDP cannot gather in two dtypes (tie_word_embeddings)"
    if fused_head and module is model.get_output_embeddings():
        return "fused kernels read its weight without calling it; set model.use_fused_kernels=false"
    if _attends(within) and "flash" in (model.config._attn_implementation or ""):
        return "flash attention has no fp32; set model.override_config.attn_implementation=sdpa"
    return None


def _calls_some(name: str, module: torch.nn.Module) -> bool:
    """Return whether the module lists experts: ranks may call, and would then gather, different ones."""
    return name.endswith("experts") and isinstance(module, torch.nn.ModuleList)


def _routes(modules: Mapping[str, torch.nn.Module], name: str) -> bool:
    """Return whether the module is a router: beside ``experts``, with a row of weights for each of them.

    The gate of a shared expert has one row.
    """
    weight = getattr(modules[name], "weight", None)
    beside = name.rpartition(".")[0] + ".experts"
    return beside in modules and weight is not None and weight.ndim == 2 and len(weight) > 1


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


def _cast_linears(head: torch.nn.Module, device: str) -> None:
    """Make the head's linear layers, with LoRA several, multiply in fp32 whatever dtype their weights have."""
    for layer in head.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.forward = functools.partial(_linear_in_fp32, layer, device)


def _linear_in_fp32(layer: torch.nn.Linear, device: str, x: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    with torch.autocast(device, enabled=False):
        return torch.nn.functional.linear(x.float(), layer.weight.float(), bias)


def fp32_wrap_policy(
    policy: Optional[Callable[..., bool]], kept: Mapping[str, torch.nn.Module], mixed_precision: Any
) -> Optional[Callable[..., bool]]:
    """Return FSDP1's ``auto_wrap_policy`` that also wraps each kept module separately, with its parameters in fp32.

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
    """Shard each kept module separately under FSDP2, with its parameters in fp32, and mark it ``sharded_in_fp32``.

    Call it before the rest is sharded.

    Args:
        kept: the result of :func:`keep_in_fp32`.
        fsdp_kwargs: ``fully_shard``'s arguments for all other modules.
    """
    for module in kept.values():
        mp_policy = replace(fsdp_kwargs["mp_policy"], param_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(module, **{**fsdp_kwargs, "mp_policy": mp_policy})
        module.sharded_in_fp32 = True
