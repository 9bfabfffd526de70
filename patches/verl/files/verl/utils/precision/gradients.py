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
"""Measure gradients over all ranks: their norm, and the first that is not finite."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Optional

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor


def gradient_norm(module: torch.nn.Module, device: torch.device) -> torch.Tensor:
    """Return the L2 norm of a module's gradients over all ranks: 0-d, fp32, on ``device``, equal on every rank.

    Every rank must call it. The one scalar all-reduce is over all ranks, not only over those of a shard group, so that
    an inf or NaN of one reaches every rank under HSDP too. A rank's part is divided by the number of ranks that have
    the same shard.
    """
    by_shards: dict[int, list[torch.Tensor]] = defaultdict(list)
    for parameter in module.parameters():
        if parameter.grad is not None:
            by_shards[_shards(module, parameter.grad)].append(local_shard(parameter.grad))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    square = torch.zeros((), dtype=torch.float32, device=device)
    for shards, gradients in by_shards.items():
        square += torch.nn.utils.get_total_norm(gradients).to(device).square() * (shards / ranks)
    if ranks > 1:
        dist.all_reduce(square)
    return square.sqrt()


def _shards(module: torch.nn.Module, gradient: torch.Tensor) -> int:
    """Return the number of ranks over which a gradient is sharded."""
    if isinstance(gradient, DTensor):
        mesh = gradient.device_mesh
        return math.prod(mesh.size(dim) for dim, placed in enumerate(gradient.placements) if placed.is_shard())
    if isinstance(module, FullyShardedDataParallel) and module.sharding_strategy != ShardingStrategy.NO_SHARD:
        return module.process_group.size()
    return 1


def local_shard(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def first_nonfinite_gradient(named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> str:
    """Describe the first parameter with a non-finite gradient and the rank of its shard; every rank must call it.

    Returns:
        Its name, the rank, the number of non-finite elements in that shard, and the largest of the others, still
        multiplied by the loss scale.
    """
    found = next(_nonfinite_gradients(named_parameters), None)
    found_by_rank: list[Optional[tuple[int, int, str]]] = [found]
    if dist.is_initialized():
        found_by_rank *= dist.get_world_size()
        dist.all_gather_object(found_by_rank, found)
    return min((each for each in found_by_rank if each), default=(0, 0, "none, but their norm leaves fp32"))[-1]


def _nonfinite_gradients(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
) -> Iterator[tuple[int, int, str]]:
    """Yield this rank's: the parameter's position, that of its part, and a description."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for place, (name, parameter) in enumerate(named_parameters):
        for part, (full_name, gradient) in enumerate(_gradients_of(name, parameter)):
            finite = gradient.isfinite()
            if not finite.all():
                bad = f"{gradient.numel() - finite.sum()} of {gradient.numel()} elements"
                rest = (
                    f"the largest other {gradient[finite].abs().max():.3g} (scaled)" if finite.any() else "none finite"
                )
                yield place, part, f"{full_name} in the shard of rank {rank}, {bad}, {rest}"


def _gradients_of(name: str, parameter: torch.nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's gradients by name; a flat parameter of FSDP1 contains those of a whole unit."""
    name = name.replace("_fsdp_wrapped_module.", "")
    if parameter.grad is None:
        return
    if not isinstance(parameter, FlatParameter):
        yield name, local_shard(parameter.grad)
        return
    for inner, shard in zip(parameter._fqns, parameter._shard_param_infos, strict=True):
        part = parameter.grad[shard.offset_in_shard :][: shard.numel_in_shard] if shard.in_shard else parameter.grad[:0]
        yield name.removesuffix("_flat_param") + inner, part
