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
"""The precision of a worker, decided once: which dtype each hop has, and a loss scaler that reports what it does.

The module needs torch and the standard library alone. verl's engines and configs call it; it calls none of them.

Why: in fp16 on both sides the trainer's and the rollout's log-probabilities agree far better than in bf16
(Qi et al. 2025, "Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788). fp16 needs a loss scale, and
its state has to be configured, saved and seen. Upstream's scaler: verl PRs #4036 and #6150.
"""

import ctypes
import difflib
import functools
import importlib.metadata
import inspect
import json
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

__all__ = [
    "GradScalerConfig",
    "LossScaler",
    "LossScaleError",
    "Precision",
    "StepAccounting",
    "check_adapter",
    "check_engine_dtype",
    "check_keep_fp32",
    "check_rewards",
    "check_role_dtype",
    "check_rollout_dtype",
    "check_sft",
    "check_workers",
    "dtype_name",
    "gradient_norm",
    "fp32_wrap_policy",
    "keep_in_fp32",
    "load_scaler_state",
    "megatron_scaler",
    "patch_stamp",
    "report",
    "save_after_storm",
    "set_wire_dtype",
    "sft_precision",
    "shard_in_fp32",
    "to_dtype",
    "wire_kwargs",
    "worker_scaler",
]

_DTYPES = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
    # verl's PrecisionType knows these too.
    16: torch.float16,
    "16": torch.float16,
    32: torch.float32,
    "32": torch.float32,
}
_ALLOWED = "float16 (fp16), bfloat16 (bf16) or float32 (fp32)"

# Engines that read `dtype`. The others have no loss scaler and a fixed autocast: they train in bf16 whatever is asked.
_STRATEGIES = (None, "fsdp", "fsdp2", "megatron")


def to_dtype(value: str | torch.dtype, key: str) -> torch.dtype:
    """The torch dtype that ``value`` names.

    Raises:
        ValueError: ``value`` is no dtype that verl computes in; the message names ``key`` and what is allowed.
    """
    if value in _DTYPES.values():
        return value
    if value not in _DTYPES:
        raise ValueError(f"{key}={value} is not a dtype to compute in: choose {_ALLOWED}")
    return _DTYPES[value]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float16`` -> ``"float16"``, the spelling of verl's and vLLM's configs."""
    return str(dtype).removeprefix("torch.")


def check_engine_dtype(dtype: Optional[str], strategy: Optional[str]) -> str:
    """The dtype an engine computes in, by its full name; ``None`` is verl's default, bfloat16.

    Raises:
        ValueError: an unknown dtype, or one that the engine would ignore.
    """
    resolved = to_dtype("bfloat16" if dtype is None else dtype, "dtype")
    if resolved != torch.bfloat16 and strategy not in _STRATEGIES:
        raise ValueError(
            f"dtype={dtype} is not what strategy={strategy} trains in, which is bfloat16 alone and without a loss "
            "scaler: choose strategy fsdp, fsdp2 or megatron, or dtype bfloat16"
        )
    return dtype_name(resolved)


def check_role_dtype(dtype: Optional[str], engine_key: str, engine_config: Any) -> None:
    """Refuse a role's ``dtype`` that its engine's own key contradicts, or that its engine cannot train in.

    Args:
        dtype: the wire, e.g. ``actor_rollout_ref.actor.dtype``; ``None`` where the user left it alone.
        engine_key: the engine's key below the role, e.g. ``fsdp_config``.
        engine_config: the engine's config, its ``dtype`` and ``strategy`` resolved.

    Raises:
        ValueError: both are set and differ; a dtype that the engine would ignore.
    """
    if dtype is not None and to_dtype(dtype, "dtype") != to_dtype(engine_config.dtype, f"{engine_key}.dtype"):
        raise ValueError(
            f"dtype={dtype} and {engine_key}.dtype={engine_config.dtype} contradict each other: "
            f"set dtype alone, which {engine_key}.dtype follows (the dtype of ref and critic is the actor's until set)"
        )
    check_engine_dtype(engine_config.dtype, engine_config.strategy)


def check_rollout_dtype(dtype: str) -> None:
    """Refuse a rollout's ``dtype`` that no rollout server knows.

    Raises:
        ValueError: naming the value and what is allowed.
    """
    # The names that vLLM and SGLang share; "auto" is the dtype in the model's own config.json.
    allowed = ("auto", "half", "float16", "bfloat16", "float", "float32")
    if dtype not in allowed:
        raise ValueError(f"dtype={dtype} is unknown to the rollout: choose one of {', '.join(allowed)}")


@dataclass(frozen=True)
class GradScalerConfig:
    """Settings of the loss scaler (``fsdp_config.grad_scaler``, ``critic.fsdp.grad_scaler``).

    Args:
        init_scale: first loss scale (dimensionless).
        growth_factor: what the scale is multiplied by after ``growth_interval`` clean steps in a row.
        backoff_factor: what it is multiplied by after an overflow.
        growth_interval: clean optimizer steps before the scale grows; 400 is upstream's (verl PR #4036).
        min_scale: the scale never falls below. torch has no floor: after ~150 overflows its scale is 0 and nothing is
            detected again.
        max_consecutive_skips: so many skipped steps in a row end the run with :class:`LossScaleError`.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 400
    min_scale: float = 1.0
    max_consecutive_skips: int = 32

    def __post_init__(self):
        for key, value in vars(self).items():
            whole = key in ("growth_interval", "max_consecutive_skips")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ValueError(f"grad_scaler.{key}={value} must be a {'whole ' if whole else ''}number")
        # The scale is an fp32 number: 1.00000001 times it is itself, 1e39 is inf, and 1e-39 has no finite inverse.
        fp32 = torch.finfo(torch.float32)
        growth, backoff = (torch.tensor(f).float().item() for f in (self.growth_factor, self.backoff_factor))
        rules = {
            "init_scale": (0 < self.init_scale <= fp32.max, f"positive and at most {fp32.max:.3g}, fp32's largest"),
            "growth_factor": (1 < growth < math.inf, "above 1 (and finite) in fp32"),
            "backoff_factor": (0 < backoff < 1, "between 0 and 1 in fp32"),
            "growth_interval": (self.growth_interval >= 1, "at least 1"),
            "min_scale": (
                fp32.tiny <= self.min_scale <= self.init_scale,
                f"at least {fp32.tiny:.3g}, fp32's least, and at most init_scale={self.init_scale}",
            ),
            "max_consecutive_skips": (self.max_consecutive_skips >= 1, "at least 1"),
        }
        for key, (holds, allowed) in rules.items():
            if not holds:
                raise ValueError(f"grad_scaler.{key}={getattr(self, key)} must be {allowed}")


@dataclass(frozen=True)
class Precision:
    """What a training engine computes in, resolved once from its config and read by every hop.

    Args:
        compute: autocast and FSDP's parameters in forward and backward.
        reduce: gradient reduction.
        buffer: FSDP1's buffers.
        master: the parameters that the optimizer updates, and its state.
        loss_scaling: whether the loss is scaled (fp16 that is trained).
    """

    compute: torch.dtype
    reduce: torch.dtype
    buffer: torch.dtype
    master: torch.dtype
    loss_scaling: bool

    @classmethod
    def resolve(cls, engine_config: Any) -> "Precision":
        """Resolve an FSDP engine's config (``FSDPEngineConfig`` or anything with its attributes).

        ``mixed_precision.param_dtype`` wins where it is set; ``dtype`` holds otherwise.

        Raises:
            ValueError: unknown dtype; ``dtype`` and ``param_dtype`` contradict each other; an engine without a loss
                scaler; fp16 master weights under a trained fp16 model.
        """
        mixed = engine_config.mixed_precision or {}
        dtype = to_dtype("bfloat16" if engine_config.dtype is None else engine_config.dtype, "dtype")
        compute = to_dtype(mixed.get("param_dtype") or dtype, "mixed_precision.param_dtype")
        if compute != dtype and dtype != torch.bfloat16:
            raise ValueError(
                f"dtype={engine_config.dtype} and mixed_precision.param_dtype={mixed['param_dtype']} contradict each "
                "other: remove mixed_precision.param_dtype, or set both alike"
            )
        check_engine_dtype(dtype_name(compute), engine_config.strategy)

        trained = not engine_config.forward_only
        if engine_config.model_dtype is None:
            master = torch.float32 if trained else compute
        else:
            master = to_dtype(engine_config.model_dtype, "model_dtype")
        if trained and compute == torch.float16 and master != torch.float32:
            raise ValueError(
                f"model_dtype={engine_config.model_dtype} with dtype=float16 makes the optimizer's weights half "
                "precision, and AdamW then turns them to NaN: set model_dtype=fp32"
            )
        return cls(
            compute=compute,
            reduce=to_dtype(mixed.get("reduce_dtype") or torch.float32, "mixed_precision.reduce_dtype"),
            buffer=to_dtype(mixed.get("buffer_dtype") or torch.float32, "mixed_precision.buffer_dtype"),
            master=master,
            loss_scaling=trained and compute == torch.float16,
        )

    @classmethod
    def of_worker(cls, fsdp_config: Mapping[str, Any], trained: bool) -> "Precision":
        """Resolve the ``fsdp_config`` of a worker of verl up to 0.7.1: a ``DictConfig`` or a dataclass with ``get``.

        Any key may be missing: it is then verl's default.

        Args:
            trained: whether the worker has an optimizer for this model.

        Raises:
            ValueError: as :meth:`resolve`.
        """
        read = {key: fsdp_config.get(key) for key in ("dtype", "mixed_precision", "model_dtype")}
        return cls.resolve(SimpleNamespace(**read, strategy=None, forward_only=not trained))

    def autocast(self, device: str) -> torch.autocast:
        """Autocast to ``compute`` on a device type; none in fp32, where it could only cast down what is fp32."""
        return torch.autocast(device_type=device, dtype=self.compute, enabled=self.compute != torch.float32)

    def names(self) -> dict[str, Any]:
        """The fields with dtypes by name, for reports."""
        return {k: dtype_name(v) if isinstance(v, torch.dtype) else v for k, v in vars(self).items()}


def check_keep_fp32(patterns: Any, strategy: Optional[str]) -> None:
    """Refuse a ``keep_fp32_modules`` that is no list of names, or that the engine would ignore.

    Raises:
        ValueError: naming the key, its value and what is allowed.
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
    """Make the modules that ``patterns`` name compute in fp32, whatever is around them.

    Their inputs are cast to fp32, autocast is off inside, and what they return goes back to ``compute``, so that
    nothing else changes. A head (``lm_head``, ``score``: a child of the model itself) returns fp32: nothing of the
    model follows it. Call before FSDP wraps the model; :func:`fp32_wrap_policy` or :func:`shard_in_fp32` then gathers
    their parameters in fp32.

    Args:
        patterns: Hugging Face names such as ``lm_head``, or fnmatch patterns (``*`` matches dots too). A kept module
            keeps all that is in it.
        compute: what the rest of the model computes in.
        device: device type of the autocast around the model ("cuda", "cpu", …).
        fused_head: whether fused kernels read the head's weight without calling the head.

    Returns:
        the outermost kept modules by name.

    Raises:
        ValueError: naming a pattern that matches nothing or a module that cannot be kept apart, and why.
    """
    # peft puts two modules around the model.
    modules = {name.removeprefix("base_model.model."): module for name, module in model.named_modules() if name}
    matched: set[str] = set()
    for pattern in patterns:
        hits = {name for name in modules if fnmatchcase(name, pattern)}
        if not hits:
            # A layer's number says nothing: "model.layers.7.mlp" and its like are offered once.
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
            why = "it holds whole transformer blocks; name modules within them, or set dtype=float32"
        elif type(module).forward is torch.nn.Module.forward:
            why = f"it is a {type(module).__name__}, which is never called; name the modules in it"
        elif sharers:
            why = f"it shares a weight with {sharers[0]}, which FSDP cannot gather in two dtypes (tie_word_embeddings)"
        elif fused_head and module is model.get_output_embeddings():
            why = "fused kernels read its weight without calling it; set model.use_fused_kernels=false"
        else:
            continue
        raise ValueError(f"keep_fp32_modules: {name} cannot be kept in fp32: {why}")
    for name, module in kept.items():
        _compute_in_fp32(module, returns=compute if "." in name else torch.float32, device=device)
    return kept


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
    """FSDP1's ``auto_wrap_policy``, which also wraps each kept module by itself, with its parameters in fp32.

    Args:
        policy: the one that holds for all other modules.
        kept: of :func:`keep_in_fp32`.
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
        kept: of :func:`keep_in_fp32`.
        fsdp_kwargs: ``fully_shard``'s arguments for all other modules.
    """
    for module in kept.values():
        mp_policy = replace(fsdp_kwargs["mp_policy"], param_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(module, **{**fsdp_kwargs, "mp_policy": mp_policy})


class LossScaleError(RuntimeError):
    """The loss still overflows after ``max_consecutive_skips`` steps in a row."""


def storm_message(config: GradScalerConfig, loss_scale: float) -> str:
    """What a :class:`LossScaleError` says first."""
    return (
        f"{config.max_consecutive_skips} optimizer steps in a row overflowed (grad_scaler.max_consecutive_skips), "
        f"loss scale {loss_scale:g}"
    )


class LossScaler(ShardedGradScaler):
    """Dynamic loss scaling for FSDP1, FSDP2 and plain modules, on any device.

    ``scale(loss).backward()``, then :meth:`clip_and_step`: one pass over the gradients for their norm and one to apply
    them, one scalar all-reduce, and the norm as the only value that the host reads. torch's own sequence (``unscale_``,
    clip, ``step``, ``update``) works too.

    Differs from torch's ``ShardedGradScaler``: it scales in fp32 (an fp16 loss times 65536 overflows), has a floor,
    knows after each step whether the step was skipped, and keeps settings out of its state, so that a resumed run takes
    them from its config.

    Args:
        config: the settings.
        device: device type of the worker ("cuda", "cpu", …); torch's default of "cuda" disables the scaler elsewhere.
    """

    STATE = frozenset({"scale", "_growth_tracker", "consecutive_skips"})

    def __init__(self, config: GradScalerConfig, device: str):
        super().__init__(
            device=device,
            init_scale=config.init_scale,
            growth_factor=config.growth_factor,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
        )
        if not self.is_enabled():
            raise ValueError(f"no loss scaling on device {device}: torch disabled its gradient scaler there")
        self.config = config
        self.skipped = False
        self.consecutive_skips = 0
        self._set(config.init_scale, 0)

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """The loss times the scale, in fp32."""
        return super().scale(outputs.float())

    def get_scale(self) -> float:
        """The current scale, without reading it from the device."""
        return self._init_scale

    def clip_and_step(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module, max_norm: float) -> float:
        """Clip the gradients of ``module`` and take the optimizer's step, or skip it; then adapt the scale.

        Every rank calls it. The clip coefficient and the inverse scale are one factor; fused optimizers apply it
        themselves and skip on the device.

        Args:
            max_norm: largest norm of the unscaled gradients.

        Returns:
            the norm of the unscaled gradients before clipping; inf or NaN where the step was skipped.

        Raises:
            LossScaleError: this was one skip in a row too many.
        """
        norm = gradient_norm(module, self._scale.device) / self.get_scale()
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # torch's mark of a fused optimizer
            # Where parameters are offloaded, torch would copy both to the CPU without waiting for the copy.
            device = next(_optimized(optimizer)).device
            optimizer.grad_scale = (self._scale / (max_norm / (norm + 1e-6)).clamp(max=1.0)).to(device)
            optimizer.found_inf = norm.isfinite().logical_not().float().to(device)
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
            result = norm.item()
        else:
            result = norm.item()
            if math.isfinite(result):
                gradients = [_local(p.grad) for p in _optimized(optimizer) if p.grad is not None]
                if gradients:  # a rank may hold padding alone
                    torch._foreach_mul_(gradients, min(1.0, max_norm / (result + 1e-6)) / self.get_scale())
                optimizer.step()
        self.skipped = not math.isfinite(result)
        if self.skipped and self.consecutive_skips + 1 >= self.config.max_consecutive_skips:
            self.consecutive_skips += 1
            where = first_nonfinite_gradient(module.named_parameters())
            raise LossScaleError(f"{storm_message(self.config, self.get_scale())}, first non-finite gradient: {where}")
        self.update()
        return result

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale; ``skipped`` then says whether one of any rank is inf or NaN."""
        super().unscale_(optimizer)
        found = self._found_inf_per_device(optimizer)
        for device, summed in found.items():
            # torch sums over ranks, in shape (1,); its fused optimizers take shape () and skip at exactly 1.
            found[device] = summed.clamp(max=1.0).squeeze()
        self.skipped = any(one.item() for one in found.values())

    def update(self) -> None:
        """Adapt the scale, never below ``min_scale`` and never beyond fp32, and count the skips in a row."""
        settings, clean_steps = self.config, self._init_growth_tracker + 1
        scale = self.get_scale()
        if self.skipped:
            scale, clean_steps = max(scale * settings.backoff_factor, settings.min_scale), 0
        elif clean_steps >= settings.growth_interval:  # a resumed run may have a shorter one
            scale, clean_steps = min(scale * settings.growth_factor, torch.finfo(torch.float32).max), 0
        self._set(scale, clean_steps)
        self.consecutive_skips = self.consecutive_skips + 1 if self.skipped else 0
        self._per_optimizer_states.clear()

    def _set(self, scale: float, clean_steps: int) -> None:
        # torch makes its tensors of these two when the first loss comes; the host's copies spare a synchronisation.
        self._init_scale, self._init_growth_tracker = ctypes.c_float(scale).value, clean_steps
        if self._scale is not None:
            self._scale.fill_(scale)
            self._growth_tracker.fill_(clean_steps)

    def state_dict(self) -> Optional[dict[str, Any]]:
        """``scale`` (float), ``_growth_tracker`` and ``consecutive_skips`` (int).

        ``None`` after a storm, in which no scale worked: who resumes from its checkpoint starts at ``init_scale``.
        """
        if self.consecutive_skips >= self.config.max_consecutive_skips:
            return None
        return {
            "scale": self.get_scale(),
            "_growth_tracker": self._init_growth_tracker,
            "consecutive_skips": self.consecutive_skips,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            ValueError: a key is missing or unknown, the scale outside of fp32, or a count below 0.
        """
        if set(state_dict) != self.STATE:
            raise ValueError(f"loss scaler state has keys {sorted(state_dict)}, expected {sorted(self.STATE)}")
        scale, *counts = (state_dict[key] for key in ("scale", "_growth_tracker", "consecutive_skips"))
        fp32 = torch.finfo(torch.float32)
        if not (isinstance(scale, float) and fp32.tiny <= scale <= fp32.max):
            raise ValueError(
                f"loss scaler state has scale={scale}, expected one from {fp32.tiny:.3g} to {fp32.max:.3g}"
            )
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise ValueError(f"loss scaler state has counts {counts}, expected whole numbers of at least 0")
        self._set(state_dict["scale"], state_dict["_growth_tracker"])
        self.consecutive_skips = state_dict["consecutive_skips"]


def gradient_norm(module: torch.nn.Module, device: torch.device) -> torch.Tensor:
    """L2 norm of a module's gradients over all ranks: 0-d, fp32, on ``device``, the same everywhere.

    One scalar all-reduce over all ranks, not over those that shard alone: an inf or NaN of one reaches every rank under
    HSDP too. A rank's part is divided by the number of ranks that hold the same shard.
    """
    by_shards: dict[int, list[torch.Tensor]] = defaultdict(list)
    for parameter in module.parameters():
        if parameter.grad is not None:
            by_shards[_shards(module, parameter.grad)].append(_local(parameter.grad))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    square = torch.zeros((), dtype=torch.float32, device=device)
    for shards, gradients in by_shards.items():
        square += torch.nn.utils.get_total_norm(gradients).to(device).square() * (shards / ranks)
    if ranks > 1:
        dist.all_reduce(square)
    return square.sqrt()


def _shards(module: torch.nn.Module, gradient: torch.Tensor) -> int:
    """Over how many ranks a gradient is sharded."""
    if isinstance(gradient, DTensor):
        mesh = gradient.device_mesh
        return math.prod(mesh.size(dim) for dim, placed in enumerate(gradient.placements) if placed.is_shard())
    if isinstance(module, FullyShardedDataParallel) and module.sharding_strategy != ShardingStrategy.NO_SHARD:
        return module.process_group.size()
    return 1


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _optimized(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def load_scaler_state(scaler: Optional[LossScaler], state: Optional[Mapping[str, Any]], source: str) -> None:
    """Restore a scaler from a checkpoint's ``grad_scaler`` entry; warn where only one of the two has one.

    Args:
        source: the checkpoint file, for the messages.

    Raises:
        ValueError: the state is of another shape; the message names ``source``.
    """
    if scaler is not None and state is not None:
        try:
            scaler.load_state_dict(state)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
    elif scaler is not None:
        warnings.warn(f"{source} holds no loss scale: starting at {scaler.get_scale():g}", stacklevel=2)
    elif state is not None:
        warnings.warn(f"{source} holds a loss scale, which this run does not use (no fp16 training)", stacklevel=2)


class StepAccounting:
    """Mixin of verl's ``BaseEngine``: what became of the optimizer steps of an update.

    An update is all that happens between two advances of the LR schedule (in PPO: every mini-batch of every epoch).
    Class attributes are the defaults, because upstream's tests make engines without calling ``__init__``.
    """

    _taken = 0
    _skipped = 0
    _skips_in_a_row = 0  # of an optimizer with a loss scaler of its own
    _loss_scale: Optional[float] = None
    _update_metrics: Mapping[str, float] = {}

    def account_step(self, grad_norm: float | torch.Tensor, scaler: Optional[LossScaler]) -> Optional[float]:
        """Record a step that was just taken or skipped; clear the gradients of a skipped one.

        Args:
            grad_norm: 0-d, before clipping, the same on every rank.
            scaler: after its step; ``None`` where the loss is not scaled.

        Returns:
            the gradient norm, or ``None`` (no metric at all) where it is not finite or the step was skipped: one NaN
            would spread over the means of a whole training step.
        """
        norm = float(grad_norm)
        return self._account(math.isfinite(norm), norm, scaler.get_scale() if scaler is not None else None)

    def account_reported_step(
        self, stepped: bool, grad_norm: Optional[float], loss_scale: Optional[float], config: GradScalerConfig
    ) -> Optional[float]:
        """As :meth:`account_step`, for an optimizer that has a loss scaler of its own and says what it did (Megatron).

        Args:
            stepped: whether the weights were updated, the same on every rank.
            grad_norm: before clipping; ``None`` where the step was skipped.
            loss_scale: after the step; ``None`` where the loss is not scaled.
            config: for ``max_consecutive_skips``; the rest is the optimizer's.

        Returns:
            the gradient norm, or ``None`` where it is not finite or the step was skipped.

        Raises:
            LossScaleError: so many steps in a row were skipped; the weights are those of the last that was taken.
        """
        self._skips_in_a_row = 0 if stepped else self._skips_in_a_row + 1
        reported = self._account(stepped, grad_norm, loss_scale)
        if self._skips_in_a_row >= config.max_consecutive_skips:
            raise LossScaleError(storm_message(config, 1.0 if loss_scale is None else loss_scale))
        return reported

    def _account(self, stepped: bool, grad_norm: Optional[float], loss_scale: Optional[float]) -> Optional[float]:
        self._loss_scale = loss_scale
        if not stepped:
            self._skipped += 1
            self.optimizer_zero_grad()
            return None
        self._taken += 1
        return float(grad_norm) if math.isfinite(grad_norm) else None

    def optimizer_zero_grad(self) -> None:
        """Clear the gradients of a skipped step.

        An engine has its own; workers of verl up to 0.7.1 have none and clear the gradients before each mini-batch.
        """

    def close_update(self) -> bool:
        """End an update, before the LR schedule advances.

        Returns:
            whether the schedule should advance: not where every optimizer step of the update was skipped.
        """
        taken, skipped = self._taken, self._skipped
        self._taken = self._skipped = 0
        if taken == skipped == 0:  # an engine with an optimizer_step of its own, which does not account
            return True
        self._update_metrics = {"skipped_steps": float(skipped)}
        if self._loss_scale is not None:
            self._update_metrics["loss_scale"] = self._loss_scale
        return taken > 0

    def update_metrics(self) -> Mapping[str, float]:
        """``skipped_steps`` and, where the loss is scaled, ``loss_scale`` of the update that was closed last."""
        return self._update_metrics


def first_nonfinite_gradient(named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> str:
    """Describe the first parameter with a non-finite gradient and whose shard it is in; every rank must call it.

    Returns:
        its name, the rank, how many elements of that shard are non-finite, and how large the others are at most, still
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
    """Those of this rank: the parameter's place, that of its part, and a description."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for place, (name, parameter) in enumerate(named_parameters):
        for part, (full_name, gradient) in enumerate(_gradients_of(name, parameter)):
            finite = gradient.isfinite()
            if not finite.all():
                bad = f"{gradient.numel() - finite.sum()} of {gradient.numel()} elements"
                rest = f"the largest other {gradient[finite].abs().max():.3g} (scaled)" if finite.any() else "no other"
                yield place, part, f"{full_name} in the shard of rank {rank}, {bad}, {rest}"


def _gradients_of(name: str, parameter: torch.nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's gradients of the parameters that one holds: a flat one of FSDP1 holds those of a whole unit."""
    name = name.replace("_fsdp_wrapped_module.", "")
    if parameter.grad is None:
        return
    if not isinstance(parameter, FlatParameter):
        yield name, _local(parameter.grad)
        return
    for inner, shard in zip(parameter._fqns, parameter._shard_param_infos, strict=True):
        held = parameter.grad[shard.offset_in_shard :][: shard.numel_in_shard] if shard.in_shard else parameter.grad[:0]
        yield name.removesuffix("_flat_param") + inner, held


@contextmanager
def save_after_storm(save: Callable[[], None]) -> Iterator[None]:
    """Save a checkpoint where the body ends in a :class:`LossScaleError`, then let the run end with that error.

    What is saved is the last good state under the number of the step that was not finished, as if that step had been
    skipped: its batch is used up and is not seen again. Skipped steps changed nothing; what the step did
    before (mini-batches that did not overflow, the critic's update before the actor's storm) is in it. A
    checkpoint of that number could only be there if the run had been started behind it, which writes it anew anyway.

    Args:
        save: the trainer's own; where it fails, its error is shown above the storm's.

    Raises:
        LossScaleError: the storm's, whatever becomes of the checkpoint.
    """
    try:
        yield
    except LossScaleError as storm:
        try:
            save()
        except Exception as failed:
            raise storm from failed
        raise


def check_rewards(rewards: torch.Tensor, labels: Mapping[str, Any]) -> None:
    """Refuse a batch with a reward that is inf or NaN: its gradients would look like an overflow to the loss scaler.

    Args:
        rewards: ``(rows, tokens)``, any float dtype.
        labels: ``rows`` values per name; those of ``data_source`` and ``uid`` are shown where given.

    Raises:
        ValueError: how many rows have such a reward, and which the first of them are.
    """
    bad = (~rewards.isfinite()).any(dim=-1).nonzero().flatten().tolist()
    if bad:
        shown = [name for name in ("data_source", "uid") if name in labels]
        rows = (", ".join([f"row {row}", *(f"{name}={labels[name][row]}" for name in shown)]) for row in bad[:3])
        raise ValueError(
            f"{len(bad)} of {len(rewards)} rewards are not finite (the reward function's, or the KL penalty's where "
            f"algorithm.use_kl_in_reward is set): {'; '.join(rows)}{' …' if len(bad) > 3 else ''}"
        )


def megatron_scaler(config: GradScalerConfig) -> dict[str, Any]:
    """The settings as arguments of Megatron's ``OptimizerConfig``, which has a loss scaler of its own.

    Source: ``megatron/core/optimizer/__init__.py``, which builds it with growth factor 2 and backoff factor 0.5.

    Raises:
        ValueError: a growth or backoff factor that Megatron cannot be told.
    """
    for key, fixed in (("growth_factor", 2.0), ("backoff_factor", 0.5)):
        if getattr(config, key) != fixed:
            raise ValueError(f"grad_scaler.{key}={getattr(config, key)}: Megatron's loss scaler knows {fixed} alone")
    return {
        "initial_loss_scale": config.init_scale,
        "min_loss_scale": config.min_scale,
        "loss_scale_window": config.growth_interval,
        "hysteresis": 1,  # Megatron's 2 keeps the scale after the first overflow
    }


# The roles of verl up to 0.7.1: where each is in the config, its FSDP engine's key below that, whether it is trained.
_WORKERS = (
    ("actor_rollout_ref.actor", "fsdp_config", True),
    ("actor_rollout_ref.ref", "fsdp_config", False),
    ("critic", "model.fsdp_config", True),
    ("reward_model", "model.fsdp_config", False),
)


def worker_scaler(fsdp_config: Mapping[str, Any], precision: Precision, device: str) -> Optional[LossScaler]:
    """The loss scaler of a worker of verl up to 0.7.1, where its precision asks for one.

    Args:
        fsdp_config: its ``grad_scaler`` holds the settings; any key may be missing.
        precision: what :meth:`Precision.of_worker` made of the same ``fsdp_config``.
        device: device type of the worker.
    """
    return LossScaler(_scaler_settings(fsdp_config), device) if precision.loss_scaling else None


def _scaler_settings(fsdp_config: Mapping[str, Any]) -> GradScalerConfig:
    settings = fsdp_config.get("grad_scaler") or {}
    if isinstance(settings, GradScalerConfig):  # what Hydra made of it, where the config has dataclasses
        return settings
    return GradScalerConfig(**{key: value for key, value in settings.items() if key != "_target_"})


def check_workers(config: Mapping[str, Any]) -> None:
    """Refuse, in the driver, a PPO config that the workers of verl up to 0.7.1 cannot compute in.

    Every role of the config is checked, whether or not the algorithm uses it.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """
    model_engine = config["trainer"].get("use_legacy_worker_impl") == "disable"
    for role, fsdp_key, trained in _WORKERS:
        worker = _select(config, role)
        if worker is None or _select(worker, "strategy") is None:
            continue  # a release without this worker
        strategy, dtype = worker["strategy"], worker.get("dtype")
        if strategy not in ("fsdp", "fsdp2"):  # Megatron's own key, megatron.dtype, stays as upstream has it
            if dtype is not None and to_dtype(dtype, f"{role}.dtype") != torch.bfloat16:
                raise ValueError(
                    f"{role}.dtype={dtype} does not reach strategy={strategy} on this release, whose loss scaler ends "
                    f"the run at the first overflow: choose fsdp or fsdp2, or leave {role}.dtype null"
                )
            continue
        engine = _select(worker, fsdp_key) or {}
        with _below(f"{role}.{fsdp_key}"):
            precision = Precision.of_worker(engine, trained)
            _scaler_settings(engine)
        with _below(role):
            if model_engine:
                _check_bfloat16_alone((dtype, precision.compute), "trainer.use_legacy_worker_impl=disable", "auto")
            _check_wire(dtype, fsdp_key, precision)
    rollout = config["actor_rollout_ref"]["rollout"]
    with _below("actor_rollout_ref.rollout"):
        check_rollout_dtype(rollout["dtype"])
        if rollout.get("name") == "hf":
            _check_hf_rollout(rollout["dtype"], config["actor_rollout_ref"]["actor"])


def _check_wire(dtype: Optional[str], fsdp_key: str, precision: Precision) -> None:
    check_role_dtype(dtype, fsdp_key, SimpleNamespace(dtype=dtype_name(precision.compute), strategy=None))


def _check_hf_rollout(dtype: str, actor: Mapping[str, Any]) -> None:
    """It samples under autocast, which knows no "auto" and no "half", from weights that FSDP2 gathers for training."""
    sampled, trained = to_dtype(dtype, "dtype"), Precision.of_worker(_select(actor, "fsdp_config") or {}, True).compute
    if actor["strategy"] == "fsdp2" and sampled != trained:
        raise ValueError(
            f"dtype={dtype} with name=hf, whose weights FSDP2 rounds to the actor's {dtype_name(trained)} before: set "
            f"dtype={dtype_name(trained)}, or choose strategy fsdp or another rollout"
        )


def sft_precision(config: Mapping[str, Any]) -> Precision:
    """Resolve the config of ``fsdp_sft_trainer``, the SFT trainer of verl up to 0.7.0 that has no engine.

    Raises:
        ValueError: as :meth:`Precision.resolve`; ``dtype`` and ``model.fsdp_config`` contradict each other.
    """
    precision = Precision.of_worker(config["model"]["fsdp_config"], trained=True)
    _check_wire(config["dtype"], "model.fsdp_config", precision)
    return precision


def check_sft(config: Mapping[str, Any]) -> None:
    """Refuse what the SFT trainers on the model engine of verl up to 0.7.1 would ignore, ``+precision=fp16`` included.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """
    engine, asked = config["engine"], [_select(config, "actor_rollout_ref.actor.dtype")]
    if engine.get("strategy") in ("fsdp", "fsdp2"):
        asked.append(Precision.of_worker(engine, False).compute)
    with _below("engine"):
        _check_bfloat16_alone(asked, "SFT on the model engine", "verl.trainer.fsdp_sft_trainer, a later release")


def _check_bfloat16_alone(asked: Iterable[Any], why: str, instead: str) -> None:
    for dtype in asked:
        if dtype is not None and to_dtype(dtype, "dtype") != torch.bfloat16:
            raise ValueError(
                f"dtype={dtype_name(to_dtype(dtype, 'dtype'))} is not what {why} trains in on this release, which is "
                f"bfloat16 alone and without a loss scaler: choose {instead}, or dtype bfloat16"
            )


def _select(config: Mapping[str, Any], path: str) -> Any:
    """What a dotted path leads to; ``None`` where it leads nowhere."""
    for key in path.split("."):
        config = config.get(key) if config is not None else None
    return config


@contextmanager
def _below(key: str) -> Iterator[None]:
    """Put the path of a config's node before the key that an error of its checks begins with."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from error


def wire_kwargs(engine_cls: type, engine_kwargs: Mapping[str, Any], rollout_dtype: str) -> dict[str, Any]:
    """Constructor arguments of a checkpoint engine, with ``rollout_dtype`` where it takes one.

    Args:
        engine_kwargs: the user's, from ``checkpoint_engine.engine_kwargs``; they win, and their strings become dtypes.
        rollout_dtype: ``rollout.dtype``; ``auto`` leaves the engine's own default.
    """
    kwargs = dict(engine_kwargs)
    if rollout_dtype != "auto" and _takes(engine_cls, "rollout_dtype"):
        kwargs.setdefault("rollout_dtype", rollout_dtype)
    if "rollout_dtype" in kwargs:
        name = {"half": "float16", "float": "float32"}.get(kwargs["rollout_dtype"], kwargs["rollout_dtype"])
        kwargs["rollout_dtype"] = to_dtype(name, "rollout_dtype")
    return kwargs


def _takes(cls: type, name: str) -> bool:
    """Whether the constructor takes the argument, itself or by handing ``**kwargs`` on to a base class."""
    for base in cls.__mro__:
        parameters = inspect.signature(base.__init__).parameters
        if name in parameters:
            return True
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return False
    return False


def set_wire_dtype(engine: Any, dtype: torch.dtype) -> None:
    """Tell a training engine in which dtype to export its shards.

    Raises:
        ValueError: the engine exports bfloat16 alone.
    """
    if hasattr(engine, "wire_dtype"):
        engine.wire_dtype = dtype
    elif dtype != torch.bfloat16:
        raise ValueError(
            f"rollout.dtype={dtype_name(dtype)} with checkpoint_engine.backend=delta_sharded: {type(engine).__name__} "
            "exports bfloat16 shards; choose strategy fsdp or fsdp2, another backend, or rollout.dtype=bfloat16"
        )


def check_adapter(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return ``tensors``, a LoRA adapter about to be sent to the rollout.

    Raises:
        ValueError: it is empty, on which vLLM's worker dies and the trainer waits forever.
    """
    if not tensors:
        raise ValueError(
            f"LoRA: peft {importlib.metadata.version('peft')} returned an empty adapter for the rollout; peft finds no "
            "tensors in a nested FSDP1 model from 0.21.0 on: install peft==0.20.0"
        )
    return tensors


def patch_stamp() -> Optional[dict[str, str]]:
    """What ``patchset.py apply`` wrote beside this file: ``release``, ``stack``, ``tree``; ``None`` without it."""
    stamp = Path(__file__).with_name("precision_stamp.json")
    return json.loads(stamp.read_text()) if stamp.exists() else None


def report(role: str, rank: int, **facts: Any) -> None:
    """Print, as one line that tools can find, what a worker resolved or saw.

    Args:
        role: actor, ref, critic or rollout.
        rank: the worker's rank in its group.
        facts: e.g. ``compute="float16"``.
    """
    line = json.dumps({"role": role, "rank": rank, **facts, "stamp": patch_stamp()})
    # One write: the lines of ranks that share an output would run into each other.
    print(f"[verl-precision] {line}\n", end="", flush=True)
