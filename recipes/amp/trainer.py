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
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch._dynamo import OptimizedModule
from torch.nn.parallel import DistributedDataParallel

from recipes.amp.checkpoint import (
    InvalidCheckpointError,
    check_loadable,
    check_model,
    check_optimizer,
    optimizer_identity,
    read_checkpoint,
    write_checkpoint,
)
from recipes.amp.multiplication_dtypes import MultiplicationDtypes
from recipes.amp.trainer_config import FP16TrainingConfig, resolve_precision
from verl.utils.precision import (
    LossScaleError,
    LossScaler,
    dtype_name,
    first_nonfinite_gradient,
    gradient_norm,
    load_scaler_state,
    patch_stamp,
    to_dtype,
)

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]
COUNTERS = ("training_steps", "overflow_steps", "consecutive_skips")  # in a checkpoint


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

        Returns:
            the loss, detached, 0-d, fp32. :attr:`skipped` reports whether the update was skipped.
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
            ValueError: the loss is no scalar, or has no gradient.
            LossScaleError: in fp16, ``max_consecutive_skips`` updates in a row were skipped.
            FloatingPointError: the same in other dtypes.
        """
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
            shape = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{loss!r}"
            raise ValueError(f"loss {shape} is not a scalar tensor: reduce it, for example with .mean()")
        if not loss.requires_grad:
            raise ValueError("loss has no gradient: it was computed under no_grad, or from detached tensors")
        loss = loss.float() / self.config.accumulation_steps
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self._micro_steps += 1
        if self._micro_steps < self.config.accumulation_steps:
            return True
        self._micro_steps = 0
        self._update()
        return not self.skipped

    def _update(self) -> None:
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
                        f"{self.consecutive_skips} updates in a row had no finite gradients in "
                        f"{dtype_name(self.precision.compute)} (max_consecutive_skips), "
                        f"first non-finite gradient: {where}"
                    )
        except LossScaleError:
            self._count(math.inf)
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)

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

    def save_checkpoint(self, path: str | os.PathLike, extra: Optional[Mapping[str, Any]] = None) -> None:
        """Write model, optimizer, loss scaler, counters and provenance; completely, or not at all. DDP: on every rank.

        ``extra``, tensors and plain Python values, is what :meth:`load_checkpoint` returns. Gradients of an update that
        is being accumulated are not saved.
        """
        extra = dict(extra or {})
        check_loadable(extra)
        try:
            if not dist.is_initialized() or dist.get_rank() == 0:
                self._write(Path(path), extra)
        finally:  # or the others would wait for a rank that could not write
            if dist.is_initialized():
                dist.barrier()

    def _write(self, path: Path, extra: dict[str, Any]) -> None:
        saved = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_of": optimizer_identity(self.optimizer, self._names),
            "grad_scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "extra": extra,
            "provenance": {
                "config": asdict(self.config),
                "stats": self.get_stats(),
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "patch_stamp": patch_stamp(),
            },
        }
        write_checkpoint(path, saved)

    def load_checkpoint(self, path: str | os.PathLike) -> dict[str, Any]:
        """Load what :meth:`save_checkpoint` wrote. The config stays this trainer's, and so does the optimizer's
        implementation (``fused``, ``foreach``); learning rate and the like are the checkpoint's.

        A checkpoint without a loss scale (of another dtype, or of a run that ended in :class:`LossScaleError`) loads
        with a warning, and the scale starts at ``loss_scale``.

        Returns:
            the ``extra`` that was saved, on the CPU.

        Raises:
            InvalidCheckpointError: truncated, from a newer version, or of another model or optimizer. Nothing was
                loaded.
        """
        saved = read_checkpoint(path)
        check_model(saved["model"], self.module.state_dict(), path)
        check_optimizer(saved, optimizer_identity(self.optimizer, self._names), path)
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
            raise ValueError(
                f"{name} requires a gradient and is not in the optimizer, so nothing would clear it: add it there, or "
                "freeze it with requires_grad_(False)"
            )
        if parameter in trained and parameter.dtype != torch.float32:
            raise ValueError(
                f"{name} is {dtype_name(parameter.dtype)}: the optimizer's weights are the masters and must be "
                "float32; leave out .half(), since autocast casts where it pays"
            )
    return names
