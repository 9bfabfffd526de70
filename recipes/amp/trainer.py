"""Train a torch module in fp16 or bf16, in one process or under DDP, with the loss scaler of the patched verl.

    trainer = FP16Trainer(model, optimizer, FP16TrainingConfig())
    for batch in batches:
        loss = trainer.training_step(batch, lambda model, batch: (model(batch.x) - batch.y).square().mean())
    trainer.get_stats()["effective_dtype"]  # the dtype that the multiplications ran in

The masters are the module's own fp32 parameters, and autocast computes in 16 bits. In fp16,
``verl.utils.precision.LossScaler`` scales the loss, unscales and clips the gradients in one pass, and skips the step if
one is inf or NaN.
"""

import math
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch._dynamo import OptimizedModule
from torch.nn.parallel import DistributedDataParallel

from recipes.amp.checkpoint import InvalidCheckpointError, check_fits, read_checkpoint, write_checkpoint
from recipes.amp.multiplication_dtypes import MultiplicationDtypes
from recipes.amp.options import check_values
from verl.utils.precision import (
    GradScalerConfig,
    LossScaleError,
    LossScaler,
    Precision,
    dtype_name,
    first_nonfinite_gradient,
    gradient_norm,
    load_scaler_state,
    patch_stamp,
    to_dtype,
)

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]
COUNTERS = ("training_steps", "overflow_steps", "consecutive_skips")  # in a checkpoint


@dataclass(frozen=True)
class FP16TrainingConfig:
    """Settings of training. Raises ``ValueError`` naming the key, its value and what is allowed."""

    enabled: bool = True  # False trains in float32
    dtype: str = "float16"  # what autocast computes in: float16, bfloat16 or float32
    on_cpu: bool = False  # compute in dtype on a CPU too, where 16 bits are slow on most processors
    loss_scale: float = 65536.0  # initial one; like the next four, for float16 only
    growth_factor: float = 2.0  # of the scale, after growth_interval clean updates in a row
    backoff_factor: float = 0.5  # of the scale, after an overflow
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_consecutive_skips: int = 32  # this many skipped updates in a row end the training, in any dtype
    max_grad_norm: float = 1.0  # L2 norm to which the unscaled gradients are clipped; inf does not clip
    accumulation_steps: int = 1  # micro-batches per update; their losses are averaged

    def __post_init__(self):
        to_dtype(self.dtype, "dtype")
        try:
            self.scaler  # noqa: B018
        except ValueError as error:  # by the names of this config
            raise ValueError(str(error).replace("grad_scaler.", "").replace("init_scale", "loss_scale")) from None
        norm, parts = self.max_grad_norm, self.accumulation_steps
        rules = {
            "enabled": (isinstance(self.enabled, bool), "True or False"),
            "on_cpu": (isinstance(self.on_cpu, bool), "True or False"),
            "max_grad_norm": (type(norm) in (int, float) and norm > 0, "a positive number; inf does not clip"),
            "accumulation_steps": (type(parts) is int and parts >= 1, "a whole number of at least 1"),
        }
        check_values(self, rules)

    @property
    def scaler(self) -> GradScalerConfig:
        """Return the settings of the loss scaler."""
        same = [each.name for each in fields(GradScalerConfig) if each.name != "init_scale"]
        return GradScalerConfig(init_scale=self.loss_scale, **{name: getattr(self, name) for name in same})


def resolve_precision(config: FP16TrainingConfig, device: torch.device) -> tuple[Precision, Optional[str]]:
    """Return the precision on ``device`` and, where it is not the requested one, the reason."""
    compute, fallback = to_dtype(config.dtype if config.enabled else "float32", "dtype"), None
    if compute != torch.float32 and device.type == "cpu" and not config.on_cpu:
        name = dtype_name(compute)
        fallback = f"the model is on the CPU: training in float32, not {name} (to train in {name} anyway: on_cpu=True, "
        fallback += "or a recipe's --device cpu)"
    elif compute == torch.bfloat16 and device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name(device)
            fallback = f"{name} has no bfloat16: training in float32 (float16 would work there)"
    if fallback is not None:
        compute = torch.float32
    single = dict.fromkeys(("reduce", "buffer", "master", "base"), torch.float32)
    return Precision(compute=compute, **single, loss_scaling=compute == torch.float16), fallback


class FP16Trainer:
    """Train a module with autocast, loss scaling, gradient accumulation, clipping and skipped steps, with statistics.

    Args:
        model: a module, or one in ``DistributedDataParallel``, ``torch.compile`` or both, with fp32 parameters.
        optimizer: over all parameters of ``model`` that require a gradient; fused ones skip on the device.

    Raises:
        ValueError: naming a parameter that is not fp32, or that only one of model and optimizer trains.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: FP16TrainingConfig):
        self.model, self.optimizer, self.config = model, optimizer, config
        self.module, self._ddp = model, None
        while isinstance(self.module, (DistributedDataParallel, OptimizedModule)):
            if isinstance(self.module, DistributedDataParallel):
                self.module, self._ddp = self.module.module, self.module
            else:
                self.module = self.module._orig_mod
        self._names = checked_names(self.module, optimizer)
        self.device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
        self.precision, self.fallback = resolve_precision(config, self.device)
        if self.fallback is not None:
            warnings.warn(self.fallback, stacklevel=2)
        self.scaler = self._new_scaler()
        self.training_steps = self.overflow_steps = self.consecutive_skips = 0  # updates
        self.skipped = False  # the last update
        self.grad_norm: Optional[float] = None
        self._micro_steps = 0  # of the update that is being accumulated
        self._shares: dict[str, float] = {}  # of each dtype in the multiplications of the first forward

    def _new_scaler(self) -> Optional[LossScaler]:
        return LossScaler(self.config.scaler, self.device.type) if self.precision.loss_scaling else None

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Autocast the forward and the loss to the trainer's dtype; the first region observes the effective dtype.

        Call ``backward`` and change weights only outside of the region, in which autocast reuses its first 16-bit
        copies of them. Compiled modules run eagerly in the first region, where a dispatch mode observes operations.
        """
        with self.precision.autocast(self.device.type):
            if self._shares:
                yield
            else:
                # Without the stance, dynamo would permanently discard the compiled code under a dispatch mode.
                with torch.compiler.set_stance("force_eager"), MultiplicationDtypes() as observed:
                    yield
                self._shares = observed.shares()

    def training_step(self, batch: Any, compute_loss_fn: LossFunction) -> torch.Tensor:
        """Run forward, backward and, with the last micro-batch of an update, the optimizer's step.

        ``compute_loss_fn`` returns the loss, 0-d, and runs under :meth:`autocast`. Errors: :meth:`backward_and_step`.
        Returns the loss, detached, 0-d, fp32. :attr:`skipped` reports whether the update was skipped.
        """
        last = self._micro_steps + 1 == self.config.accumulation_steps
        local = self._ddp is not None and not last
        with self._ddp.no_sync() if local else nullcontext():  # around the forward too, as DDP requires
            with self.autocast():
                loss = compute_loss_fn(self.model, batch)
            self.backward_and_step(loss)
        return loss.detach().float()

    def backward_and_step(self, loss: torch.Tensor) -> bool:
        """Run the backward of a loss that was computed under :meth:`autocast`, and the step that is then due.

        Here DDP synchronizes the gradients of every micro-batch; in :meth:`training_step` only those of the last one.

        Returns:
            ``False`` if this update was skipped because a gradient is inf or NaN: weights and optimizer state are
            unchanged, the gradients of all its micro-batches are cleared, and in fp16 the scale falls.

        Raises:
            LossScaleError: in fp16, ``max_consecutive_skips`` updates in a row were skipped.
            FloatingPointError: the same in other dtypes.
        """
        loss = loss.float() / self.config.accumulation_steps
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self._micro_steps += 1
        if self._micro_steps < self.config.accumulation_steps:
            return True
        self._micro_steps = 0
        try:
            if self.scaler is not None:
                self._count(self.scaler.clip_and_step(self.optimizer, self.module, self.config.max_grad_norm))
            else:
                norm = gradient_norm(self.module, self.device)
                self._count(norm.item())
                if not self.skipped:
                    torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), self.config.max_grad_norm, norm)
                    self.optimizer.step()
                elif self.consecutive_skips >= self.config.max_consecutive_skips:
                    where = first_nonfinite_gradient(self.module.named_parameters())
                    raise FloatingPointError(
                        f"{self.consecutive_skips} updates in a row (max_consecutive_skips) had no finite gradients in "
                        f"{dtype_name(self.precision.compute)}, first non-finite gradient: {where}"
                    )
        except LossScaleError:
            self._count(math.inf)
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return not self.skipped

    def _count(self, norm: float) -> None:
        self.skipped = not math.isfinite(norm)
        self.grad_norm = None if self.skipped else norm
        self.training_steps += 1
        self.overflow_steps += self.skipped
        self.consecutive_skips = self.consecutive_skips + 1 if self.skipped else 0

    def get_stats(self) -> dict[str, Any]:
        """Return the statistics up to now, for a logger; ``effective_dtype`` is ``None`` before the first forward."""
        return {
            "training_steps": self.training_steps,
            "overflow_steps": self.overflow_steps,
            "overflow_rate": self.overflow_steps / max(self.training_steps, 1),
            "consecutive_skips": self.consecutive_skips,
            "current_scale": self.scaler.get_scale() if self.scaler is not None else 1.0,
            "grad_norm": self.grad_norm,
            "requested_dtype": dtype_name(to_dtype(self.config.dtype, "dtype")) if self.config.enabled else "float32",
            "effective_dtype": next(iter(self._shares), None),
            "effective_dtype_share": dict(self._shares),
            "loss_scaling": self.scaler is not None,
            "device": self.device.type,
            "fallback": self.fallback,
        }

    def _state(self) -> dict[str, Any]:
        groups = [[self._names[parameter] for parameter in group["params"]] for group in self.optimizer.param_groups]
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_of": {"class": type(self.optimizer).__name__, "groups": groups},
        }

    def save_checkpoint(self, path: str | os.PathLike, extra: Optional[Mapping[str, Any]] = None) -> None:
        """Write model, optimizer, loss scaler, counters and provenance; completely, or not at all. DDP: on every rank.

        ``extra``, tensors and plain Python values, is what :meth:`load_checkpoint` returns. Gradients of an update that
        is being accumulated are not saved.
        """
        provenance = {
            "config": asdict(self.config),
            "stats": self.get_stats(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "patch_stamp": patch_stamp(),
        }
        saved = {
            **self._state(),
            "grad_scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "extra": dict(extra or {}),
            "provenance": provenance,
        }
        try:
            if not dist.is_initialized() or dist.get_rank() == 0:
                write_checkpoint(Path(path), saved)
        finally:  # or the others would wait for a rank that could not write
            if dist.is_initialized():
                dist.barrier()

    def load_checkpoint(self, path: str | os.PathLike) -> dict[str, Any]:
        """Load what :meth:`save_checkpoint` wrote. The config stays this trainer's, and so does the optimizer's
        implementation (``fused``, ``foreach``); learning rate and the like are the checkpoint's.

        A checkpoint without a loss scale (of another dtype, or of a run that ended in :class:`LossScaleError`) loads
        with a warning, and the scale starts at ``loss_scale``. Returns the ``extra`` that was saved, on the CPU.
        Raises ``InvalidCheckpointError``, and loads nothing, if it is truncated or of another model or optimizer.
        """
        saved = read_checkpoint(path)
        check_fits(saved, self._state(), path)
        scaler = self._new_scaler()
        try:
            load_scaler_state(scaler, saved.get("grad_scaler"), str(path))
        except ValueError as error:
            raise InvalidCheckpointError(str(error)) from None
        self.scaler = scaler
        self.module.load_state_dict(saved["model"])
        groups = [
            saved_group | {key: group[key] for key in ("foreach", "fused") if key in group}
            for saved_group, group in zip(saved["optimizer"]["param_groups"], self.optimizer.param_groups, strict=True)
        ]
        self.optimizer.load_state_dict({**saved["optimizer"], "param_groups": groups})
        self.optimizer.zero_grad(set_to_none=True)
        for name in COUNTERS:
            setattr(self, name, saved["counters"].get(name, 0))
        if scaler is not None:
            self.consecutive_skips = scaler.consecutive_skips
        self.skipped, self.grad_norm, self._micro_steps = False, None, 0
        return saved["extra"]


def checked_names(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, str]:
    """Return the names of a module's parameters, after a check that the optimizer trains the same ones in float32."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not trained <= names.keys():
        raise ValueError("the optimizer has parameters that are not the model's, whose overflows would go unnoticed")
    for parameter, name in names.items():
        if parameter.requires_grad and parameter not in trained:
            raise ValueError(f"{name} requires a gradient and is not in the optimizer: add it, or freeze it")
        if parameter in trained and parameter.dtype != torch.float32:
            kind = dtype_name(parameter.dtype)
            raise ValueError(f"{name} is {kind}: the optimizer's weights must be float32; leave out .half()")
    return names
