"""Train a torch module in fp16 or bf16, one process or DDP, on verl-precision's own loss scaler.

    trainer = FP16Trainer(model, optimizer, FP16TrainingConfig())
    for batch in batches:
        loss = trainer.training_step(batch, lambda model, batch: (model(batch.x) - batch.y).square().mean())
    trainer.get_stats()["effective_dtype"]  # the dtype that the multiplications ran in

Masters are the module's own fp32 parameters, autocast computes in 16 bits, and in fp16 the loss is scaled by
``verl.utils.precision.LossScaler``: unscaled and clipped in one pass, and skipped where a gradient is inf or NaN.
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
    check_model,
    check_optimizer,
    check_plain,
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


class FP16Trainer:
    """Train a module with autocast, loss scaling, gradient accumulation, clipping and skipped steps, with statistics.

    Args:
        model: a module, or one in ``DistributedDataParallel``, ``torch.compile`` or both; its parameters are the fp32
            masters.
        optimizer: over all parameters of ``model`` that require a gradient; fused ones skip on the device.
        config: see :class:`FP16TrainingConfig`.

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
        self._names = _checked_names(self.module, optimizer)
        self.device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
        self.precision, self.fallback = resolve_precision(config, self.device)
        if self.fallback is not None:
            warnings.warn(self.fallback, stacklevel=2)
        self.scaler = self._new_scaler()
        self.training_steps = 0
        self.overflow_steps = 0
        self.consecutive_skips = 0
        self.skipped = False  # the last update
        self.grad_norm: Optional[float] = None
        self._micro_steps = 0  # of the update that is being accumulated
        self._shares: dict[str, float] = {}
        self._for_inference = False

    def _new_scaler(self) -> Optional[LossScaler]:
        return LossScaler(self.config.scaler, self.device.type) if self.precision.loss_scaling else None

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Autocast the forward and the loss to the trainer's dtype; the first region observes the effective dtype.

        ``backward`` belongs outside, and so does whatever changes the weights: until the region ends, autocast computes
        with the 16-bit copies that it made of them first. Compiled modules run eagerly in the first region, where
        a dispatch mode observes their operations.
        """
        with self.precision.autocast(self.device.type):
            if self._shares:
                yield
            else:
                # Under a dispatch mode alone, dynamo would discard the compiled code for good.
                with torch.compiler.set_stance("force_eager"), MultiplicationDtypes() as observed:
                    yield
                self._shares = observed.shares()

    def training_step(self, batch: Any, compute_loss_fn: LossFunction) -> torch.Tensor:
        """Run forward, backward and, with the last micro-batch of an update, the optimizer's step.

        Args:
            batch: passed to ``compute_loss_fn``.
            compute_loss_fn: ``(model, batch) -> loss``, 0-d; called under :meth:`autocast`.

        Returns:
            the loss, detached, 0-d, fp32. :attr:`skipped` reports whether the update was skipped.

        Raises:
            ValueError: the loss is no scalar, or has no gradient.
            LossScaleError, FloatingPointError: as :meth:`backward_and_step`.
        """
        last = self._micro_steps + 1 == self.config.accumulation_steps
        alone = self._ddp is not None and not last
        with self._ddp.no_sync() if alone else nullcontext():  # around the forward too, as DDP asks
            with self.autocast():
                loss = compute_loss_fn(self.model, batch)
            self.backward_and_step(loss)
        return loss.detach().float()

    def backward_and_step(self, loss: torch.Tensor) -> bool:
        """Run the backward of a loss that was computed under :meth:`autocast`, and the step that is then due.

        DDP synchronises the gradients of every micro-batch here; :meth:`training_step` those of the last one alone.

        Returns:
            ``False`` if this update was skipped, for a gradient that is inf or NaN: weights and optimizer state are
            untouched, the gradients of all its micro-batches are cleared, and in fp16 the scale falls.

        Raises:
            ValueError: the loss is no scalar, or has no gradient.
            LossScaleError: in fp16, ``max_consecutive_skips`` updates in a row were skipped.
            FloatingPointError: so in other dtypes.
        """
        if self._for_inference:
            raise ValueError("the model was cast to float16 for inference: train one with float32 weights")
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
            if self.scaler is None:
                self._count(self._clip_and_step())
                self._check_storm()
            else:
                self._count(self.scaler.clip_and_step(self.optimizer, self.module, self.config.max_grad_norm))
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

    def _check_storm(self) -> None:
        """Raise after too many consecutive skips, as the scaler does, in dtypes without a loss scale."""
        if self.consecutive_skips >= self.config.max_consecutive_skips:
            where = first_nonfinite_gradient(self.module.named_parameters())
            raise FloatingPointError(
                f"{self.consecutive_skips} updates in a row had no finite gradients in "
                f"{dtype_name(self.precision.compute)} (max_consecutive_skips), first non-finite gradient: {where}"
            )

    def _clip_and_step(self) -> float:
        """Clip, step unless the norm is not finite, and return the norm, in dtypes without a loss scale."""
        norm = gradient_norm(self.module, self.device)
        result = norm.item()
        if math.isfinite(result):
            torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), self.config.max_grad_norm, norm)
            self.optimizer.step()
        return result

    def get_stats(self) -> dict[str, Any]:
        """Return the statistics up to now, for a logger.

        ``training_steps`` are updates, ``overflow_steps`` those of them that were skipped. ``effective_dtype`` is the
        one in which most multiplications of the first forward ran, ``effective_dtype_share`` the share of each:
        observed, ``None`` before the first forward.
        """
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

    def cast_model_to_fp16(self) -> torch.nn.Module:
        """Cast the weights to float16, for inference alone: no step is taken afterwards.

        Raises:
            ValueError: this trainer scales its loss, so the weights are the masters that the optimizer updates.
        """
        if self.scaler is not None:
            raise ValueError(
                "cast_model_to_fp16 with a loss scaler: these weights are the optimizer's masters; in float16 they "
                "lose small updates, and Adam's epsilon is 0. Autocast computes in float16 already; cast a copy instead"
            )
        self._for_inference = True
        return self.module.half()

    def save_checkpoint(self, path: str | os.PathLike, extra: Optional[Mapping[str, Any]] = None) -> None:
        """Write model, optimizer, loss scaler, counters and provenance; whole, or not at all. DDP: every rank calls it.

        Gradients of an update that is being accumulated are not saved.

        Args:
            extra: tensors and plain Python values, which :meth:`load_checkpoint` returns.

        Raises:
            ValueError: ``extra`` contains something else, or the weights were cast for inference.
        """
        extra = dict(extra or {})
        check_plain(extra, "extra")
        if self._for_inference:
            raise ValueError("the model was cast to float16 for inference: a checkpoint contains float32 weights")
        try:
            if not dist.is_initialized() or dist.get_rank() == 0:
                self._write(Path(path), extra)
        finally:  # the others are not left waiting for a rank that could not write
            if dist.is_initialized():
                dist.barrier()

    def _write(self, path: Path, extra: dict[str, Any]) -> None:
        counters = ("training_steps", "overflow_steps", "consecutive_skips")
        saved = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_of": optimizer_identity(self.optimizer, self._names),
            "grad_scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "counters": {name: getattr(self, name) for name in counters},
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
        implementation (``fused``, ``foreach``); its learning rate and the like are the checkpoint's.

        A checkpoint without a loss scale (of another dtype, or of a run that ended in :class:`LossScaleError`) loads
        with a warning, and the scale starts anew.

        Returns:
            the ``extra`` that was saved, on the CPU.

        Raises:
            FileNotFoundError: there is no such file.
            InvalidCheckpointError: truncated, from a newer version, or of another model or optimizer; nothing was
                loaded.
        """
        saved = read_checkpoint(path)
        check_model(saved["model"], self.module.state_dict(), path)
        groups = check_optimizer(saved, self.optimizer, self._names, path)
        scaler = self._new_scaler()
        try:
            load_scaler_state(scaler, saved.get("grad_scaler"), str(path))
        except ValueError as error:
            raise InvalidCheckpointError(str(error)) from None
        counters = saved["counters"]
        self.scaler = scaler
        self.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict({**saved["optimizer"], "param_groups": groups})
        self.optimizer.zero_grad(set_to_none=True)
        self.training_steps, self.overflow_steps = counters.get("training_steps", 0), counters.get("overflow_steps", 0)
        skips = counters.get("consecutive_skips", 0)
        self.consecutive_skips = skips if scaler is None else scaler.consecutive_skips
        self.skipped, self.grad_norm, self._micro_steps = False, None, 0
        return saved["extra"]


def _checked_names(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, str]:
    """Return the names of a module's parameters, after a check that the optimizer trains the same ones in float32.

    Raises:
        ValueError: naming the parameter that is not fp32, or that only one of the two trains.
    """
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
