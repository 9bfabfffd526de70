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
"""Resolve the dtypes that an engine computes in, once, from its config.

A config that requests no precision (:func:`requests_precision`) gives :data:`UNREQUESTED`, with which every hook leaves
the engine to upstream's own lines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Optional

import torch

from .keep_fp32 import check_keep_fp32
from .scaler import GradScalerConfig

_DTYPES = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
    # verl's PrecisionType has these too.
    16: torch.float16,
    "16": torch.float16,
    32: torch.float32,
    "32": torch.float32,
}
_ALLOWED = "float16 (fp16), bfloat16 (bf16) or float32 (fp32)"

# Engines that read `dtype`. The others have no loss scaler and a fixed autocast: they train in bf16 whatever it is.
_STRATEGIES = (None, "fsdp", "fsdp2", "megatron")


def to_dtype(value: str | torch.dtype, key: str) -> torch.dtype:
    """Return the torch dtype that ``value`` names.

    Args:
        value: a name such as ``"fp16"``, a number of bits as verl's ``PrecisionType`` has them, or a torch dtype.
        key: the config key of ``value``, for the message.

    Raises:
        ValueError: ``value`` is not a dtype to compute in; the message names ``key``, the value and what is allowed.
    """
    if value in _DTYPES.values():
        return value
    if value not in _DTYPES:
        raise ValueError(f"{key}={value} is not a dtype to compute in: choose {_ALLOWED}")
    return _DTYPES[value]


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as verl's and vLLM's configs spell it: ``torch.float16`` -> ``"float16"``."""
    return str(dtype).removeprefix("torch.")


def cast_parameters(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast a model's parameters in place and leave its buffers: 16 bits would round RoPE's frequencies."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def check_engine_dtype(dtype: Optional[str], strategy: Optional[str]) -> torch.dtype:
    """Return the dtype that an engine is to compute in; ``None`` is verl's default, bfloat16.

    Raises:
        ValueError: the dtype is unknown, or the engine would ignore it.
    """
    resolved = to_dtype("bfloat16" if dtype is None else dtype, "dtype")
    if resolved != torch.bfloat16 and strategy not in _STRATEGIES:
        raise ValueError(
            f"dtype={dtype} is not what strategy={strategy} trains in, which is bfloat16 without a loss scaler: "
            "choose strategy fsdp, fsdp2 or megatron, or dtype bfloat16"
        )
    if resolved == torch.float32 and strategy == "megatron":
        raise ValueError(f"dtype={dtype} is not supported by strategy=megatron: choose bfloat16 or float16")
    return resolved


def join_dtypes(dtype: Optional[str], engine_key: str, engine_config: Any) -> Optional[str]:
    """Return the dtype that a role's key and its engine's own keys set together.

    Args:
        dtype: the role's key, e.g. ``actor_rollout_ref.actor.dtype``; ``None`` where it is not set.
        engine_key: the engine's config below the role, e.g. ``fsdp_config``.
        engine_config: as for :func:`requests_precision`. The role's dtype overrides a ``dtype`` that is upstream's
            default, bfloat16.

    Raises:
        ValueError: the role's dtype differs from the engine's ``dtype`` or ``mixed_precision.param_dtype``.
    """
    engine_dtype = _value(engine_config, "dtype")
    if dtype is None:
        return engine_dtype
    compute = to_dtype(dtype, "dtype")
    for key, value, allowed in (
        ("mixed_precision.param_dtype", _param_dtype(engine_config), (compute,)),  # first: a config copies it to dtype
        ("dtype", engine_dtype, (compute, torch.bfloat16)),
    ):
        if value is not None and to_dtype(value, f"{engine_key}.{key}") not in allowed:
            raise ValueError(
                f"dtype={dtype} and {engine_key}.{key}={value} contradict each other: remove {engine_key}.{key} "
                "(the dtype of ref and critic is the actor's until set)"
            )
    return dtype


def requests_precision(engine_config: Any) -> bool:
    """Return whether an engine's config requests a precision; without a request the hooks change nothing.

    A request is the role's ``dtype`` (its engine's config is marked ``precision_requested``), a ``dtype`` of the engine
    other than bfloat16, fp16 by ``mixed_precision.param_dtype``, a setting of ``grad_scaler``, or a module in
    ``keep_fp32_modules``.

    Args:
        engine_config: a mapping, or an object with some of these as attributes; a missing one has verl's default.

    Raises:
        ValueError: a setting of ``grad_scaler`` is invalid.
    """
    scaler = GradScalerConfig.read(_value(engine_config, "grad_scaler"))
    dtype, param_dtype = _value(engine_config, "dtype"), _param_dtype(engine_config)
    return (
        bool(_value(engine_config, "precision_requested"))
        or (dtype is not None and _DTYPES.get(dtype, dtype) != torch.bfloat16)
        or _DTYPES.get(param_dtype, param_dtype) == torch.float16
        or scaler != GradScalerConfig()
        or bool(_value(engine_config, "keep_fp32_modules"))
    )


def _value(engine_config: Any, key: str) -> Any:
    return engine_config.get(key) if isinstance(engine_config, Mapping) else getattr(engine_config, key, None)


def _param_dtype(engine_config: Any) -> Any:
    mixed = _value(engine_config, "mixed_precision")  # a flag in the configs of some engines
    return mixed.get("param_dtype") if isinstance(mixed, Mapping) else None


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training engine, resolved once from its config and read by every hop.

    Args:
        compute: dtype of autocast and of FSDP's parameters in forward and backward.
        reduce: dtype of the gradient reduction.
        buffer: dtype of FSDP1's buffers.
        master: dtype of the parameters that the optimizer updates, and of its state.
        base: dtype in which the model is loaded: the master's, or with LoRA that of the frozen weights.
        loss_scaling: whether the loss is scaled (trained in fp16).
        requested: whether a key requests this precision; otherwise upstream's own lines decide.
        reported: whether the worker prints its dtypes (``report_dtypes`` of its engine's config).
    """

    compute: torch.dtype
    reduce: torch.dtype
    buffer: torch.dtype
    master: torch.dtype
    base: torch.dtype
    loss_scaling: bool
    requested: bool = True
    reported: bool = True

    @classmethod
    def resolve(cls, engine_config: Any, lora: Optional[bool] = None) -> "Precision":
        """Resolve an FSDP engine's config (``FSDPEngineConfig`` or anything with its attributes).

        ``mixed_precision.param_dtype`` wins where it is set, ``dtype`` decides otherwise. A config that requests
        nothing is not checked, and gives :data:`UNREQUESTED`.

        Args:
            lora: whether LoRA adapters are trained in place of the weights: they are fp32 masters, and ``model_dtype``
                is the base's. None where only the engine's config is known: its master weights are not checked then.

        Raises:
            ValueError: a dtype is unknown; ``dtype`` and ``param_dtype`` contradict each other; the engine has no loss
                scaler; a model trained in fp16 has half-precision master weights.
        """
        if not requests_precision(engine_config):
            return UNREQUESTED
        mixed = engine_config.mixed_precision or {}
        dtype = to_dtype("bfloat16" if engine_config.dtype is None else engine_config.dtype, "dtype")
        compute = to_dtype(mixed.get("param_dtype") or dtype, "mixed_precision.param_dtype")
        if compute != dtype and dtype != torch.bfloat16:
            raise ValueError(
                f"dtype={engine_config.dtype} and mixed_precision.param_dtype={mixed['param_dtype']} contradict each "
                "other: remove mixed_precision.param_dtype, or set both alike"
            )
        check_engine_dtype(dtype_name(compute), engine_config.strategy)
        check_keep_fp32(getattr(engine_config, "keep_fp32_modules", []), engine_config.strategy)

        trained = not engine_config.forward_only
        if engine_config.model_dtype is None:
            base = torch.float32 if trained else compute
        else:
            base = to_dtype(engine_config.model_dtype, "model_dtype")
        if trained and lora is False and compute == torch.float16 and base != torch.float32:
            raise ValueError(
                f"model_dtype={engine_config.model_dtype} with dtype=float16 makes the optimizer's weights half "
                "precision, and AdamW then turns them to NaN: set model_dtype=fp32, or train LoRA adapters, which stay "
                "fp32 (model.lora_rank)"
            )
        return cls(
            compute=compute,
            reduce=to_dtype(mixed.get("reduce_dtype") or torch.float32, "mixed_precision.reduce_dtype"),
            buffer=to_dtype(mixed.get("buffer_dtype") or torch.float32, "mixed_precision.buffer_dtype"),
            master=torch.float32 if lora else base,
            base=base,
            loss_scaling=trained and compute == torch.float16,
            reported=getattr(engine_config, "report_dtypes", True) is not False,
        )

    @classmethod
    def of_worker(
        cls,
        dtype: Optional[str],
        fsdp_config: Mapping[str, Any],
        trained: bool,
        lora: Optional[bool] = None,
        engine_key: str = "fsdp_config",
    ) -> "Precision":
        """Resolve the config of a worker of verl up to 0.7.1.

        Args:
            dtype: the role's key, e.g. ``actor_rollout_ref.actor.dtype``; ``None`` where it is not set.
            fsdp_config: a ``DictConfig`` or a dataclass with ``get``; a missing key has verl's default.
            trained: whether the worker has an optimizer for this model.
            lora: as in :meth:`resolve`.
            engine_key: as in :func:`join_dtypes`.

        Raises:
            ValueError: as :meth:`resolve` and :func:`join_dtypes`.
        """
        read = {key: fsdp_config.get(key) for key in ("mixed_precision", "model_dtype", "grad_scaler", "report_dtypes")}
        read["dtype"] = join_dtypes(dtype, engine_key, fsdp_config)
        requested = dtype is not None
        engine = SimpleNamespace(**read, strategy=None, forward_only=not trained, precision_requested=requested)
        return cls.resolve(engine, lora)

    @property
    def export_dtype(self) -> Optional[torch.dtype]:
        """Dtype of exported models, which a checkpoint records; ``None`` leaves upstream's, unrecorded."""
        return self.compute if self.requested else None

    def autocast(self, device: str) -> torch.autocast:
        """Return autocast to ``compute`` on a device type; disabled in fp32, which it could only lower."""
        return torch.autocast(device_type=device, dtype=self.compute, enabled=self.compute != torch.float32)

    def names(self) -> dict[str, Any]:
        """Return the dtypes by name, and ``loss_scaling``, for reports."""
        fields = {key: value for key, value in vars(self).items() if key not in ("requested", "reported")}
        return {key: dtype_name(value) if isinstance(value, torch.dtype) else value for key, value in fields.items()}


# verl's default, which no hook applies: where nothing is requested, upstream's own lines decide.
UNREQUESTED = Precision(
    compute=torch.bfloat16,
    reduce=torch.float32,
    buffer=torch.float32,
    master=torch.float32,
    base=torch.float32,
    loss_scaling=False,
    requested=False,
    reported=False,
)
