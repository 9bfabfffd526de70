"""Train a torch module in fp16 or bf16, one process or DDP, on verl-precision's own loss scaler.

    trainer = FP16Trainer(model, optimizer, FP16TrainingConfig())
    for batch in batches:
        loss = trainer.training_step(batch, lambda model, batch: (model(batch.x) - batch.y).square().mean())
    trainer.get_stats()["effective_dtype"]  # what the multiplications were really done in

Masters are the module's own fp32 parameters, autocast computes in 16 bits, and in fp16 the loss is scaled by
``verl.utils.precision.LossScaler``: unscaled and clipped in one pass, and skipped where a gradient is inf or NaN.
"""

import math
import os
import pickle
import platform
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from verl.utils.precision import (
    GradScalerConfig,
    LossScaler,
    Precision,
    dtype_name,
    first_nonfinite_gradient,
    gradient_norm,
    load_scaler_state,
    patch_stamp,
    to_dtype,
)

VERSION = 1  # of a checkpoint's layout
LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]


class CheckpointError(ValueError):
    """A checkpoint that this trainer cannot take up; the message names the file and why. Nothing was loaded."""


@dataclass(frozen=True)
class FP16TrainingConfig:
    """How to train; the scaler's settings are those of ``verl.utils.precision.GradScalerConfig``.

    Args:
        enabled: ``False`` trains in float32.
        dtype: what autocast computes in: float16, bfloat16 or float32.
        on_cpu: compute in ``dtype`` on a CPU too. Otherwise a model there is trained in float32, which the trainer says
            and records: 16 bits are for GPUs, on a CPU they are for tests.
        loss_scale: first loss scale, in fp16 alone.
        growth_factor: what the scale is multiplied by after ``growth_interval`` clean updates in a row.
        backoff_factor: what it is multiplied by after an overflow.
        growth_interval: clean updates before the scale grows.
        min_scale: the scale never falls below.
        max_consecutive_skips: so many skipped updates in a row are an error.
        max_grad_norm: clip the unscaled gradients to this L2 norm; ``inf`` does not clip.
        accumulation_steps: micro-batches an update; their losses are averaged.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """

    enabled: bool = True
    dtype: str = "float16"
    on_cpu: bool = False
    loss_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_consecutive_skips: int = 32
    max_grad_norm: float = 1.0
    accumulation_steps: int = 1

    def __post_init__(self):
        to_dtype(self.dtype, "dtype")
        try:
            self.scaler  # noqa: B018
        except ValueError as error:  # by the names of this config
            raise ValueError(str(error).replace("grad_scaler.", "").replace("init_scale", "loss_scale")) from None
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm} must be positive; inf does not clip")
        if isinstance(self.accumulation_steps, bool) or not isinstance(self.accumulation_steps, int):
            raise ValueError(f"accumulation_steps={self.accumulation_steps} must be a whole number")
        if self.accumulation_steps < 1:
            raise ValueError(f"accumulation_steps={self.accumulation_steps} must be at least 1")

    @property
    def scaler(self) -> GradScalerConfig:
        return GradScalerConfig(
            init_scale=self.loss_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            min_scale=self.min_scale,
            max_consecutive_skips=self.max_consecutive_skips,
        )


class MultiplicationDtypes(TorchDispatchMode):
    """Counts the floating-point operations of matrix products, convolutions and attention, by the dtype they run in.

    What a config asks for, and the dtype of an output, both mislead: autocast casts some operations alone, and a GRU's
    output is fp32 where its products are fp16. LSTMs that run as one oneDNN primitive are not seen.
    """

    def __init__(self):
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        count = flop_registry.get(operation._overloadpacket)
        if count is not None:
            dtype = next(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
            self.flops[dtype_name(dtype)] += count(*args, **kwargs, out_val=out)
        return out

    def shares(self) -> dict[str, float]:
        """The share of the operations in each dtype, the largest first; empty where none was seen."""
        return {dtype: flops / self.flops.total() for dtype, flops in self.flops.most_common()}


def _resolve(config: FP16TrainingConfig, device: torch.device) -> tuple[Precision, Optional[str]]:
    """The precision on this device, and why it is not the one asked for (or ``None``)."""
    compute, fallback = to_dtype(config.dtype if config.enabled else "float32", "dtype"), None
    if compute != torch.float32 and device.type == "cpu" and not config.on_cpu:
        fallback = f"the model is on the CPU: training in float32, not {dtype_name(compute)} (on_cpu=True insists)"
    elif compute == torch.bfloat16 and device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name(device)
            fallback = f"{name} has no bfloat16: training in float32 (float16 would work there)"
    if fallback is not None:
        compute = torch.float32
    return Precision(compute, torch.float32, torch.float32, torch.float32, compute == torch.float16), fallback


class FP16Trainer:
    """Owns an optimizer's steps: autocast, loss scale, accumulation, clipping, skipping, and the count of all that.

    Args:
        model: a module, or one in ``DistributedDataParallel``; its parameters are the fp32 masters.
        optimizer: over parameters of ``model``; fused ones skip on the device.
        config: see :class:`FP16TrainingConfig`.

    Raises:
        ValueError: parameters that the loss scaler cannot serve (not fp32), or that are not the model's.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: FP16TrainingConfig):
        self.model, self.optimizer, self.config = model, optimizer, config
        self.module = model.module if isinstance(model, DistributedDataParallel) else model
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(parameter not in names for parameter in trained):
            raise ValueError("the optimizer holds parameters that are not the model's: their overflows would go unseen")
        self.device = trained[0].device
        self.precision, self.fallback = _resolve(config, self.device)
        if self.fallback is not None:
            warnings.warn(self.fallback, stacklevel=2)
        self.scaler = LossScaler(config.scaler, self.device.type) if self.precision.loss_scaling else None
        half = [names[parameter] for parameter in trained if parameter.dtype != torch.float32]
        if self.scaler is not None and half:
            dtype = dtype_name(self.module.get_parameter(half[0]).dtype)
            raise ValueError(
                f"{half[0]} is {dtype}: with a loss scaler the optimizer's weights must be float32; leave out .half(), "
                "autocast casts where it pays"
            )
        self.training_steps = 0
        self.overflow_steps = 0
        self.consecutive_skips = 0
        self.skipped = False  # the last update
        self.grad_norm: Optional[float] = None
        self._micro_steps = 0  # of the update that is being accumulated
        self._shares: dict[str, float] = {}
        self._for_inference = False

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Autocast to the trainer's dtype, for the forward and the loss; the first time it sees what that does.

        ``backward`` belongs outside. So does a ``no_grad`` forward of the same weights: give it a region of its own.
        """
        with self.precision.autocast(self.device.type):
            if self._shares:
                yield
            else:
                with MultiplicationDtypes() as seen:
                    yield
                self._shares = seen.shares()

    def training_step(self, batch: Any, compute_loss_fn: LossFunction) -> torch.Tensor:
        """Forward, backward and, with the last micro-batch of an update, the optimizer's step.

        Args:
            batch: handed to ``compute_loss_fn``.
            compute_loss_fn: ``(model, batch) -> loss``, 0-d; called under :meth:`autocast`.

        Returns:
            the loss, detached, 0-d, fp32. :attr:`skipped` says whether the update was skipped.

        Raises:
            ValueError: the loss is no scalar, or has no gradient.
            LossScaleError, FloatingPointError: as :meth:`backward_and_step`.
        """
        last = self._micro_steps + 1 == self.config.accumulation_steps
        alone = isinstance(self.model, DistributedDataParallel) and not last
        with self.model.no_sync() if alone else nullcontext():  # around the forward too, as DDP asks
            with self.autocast():
                loss = compute_loss_fn(self.model, batch)
            self.backward_and_step(loss)
        return loss.detach().float()

    def backward_and_step(self, loss: torch.Tensor) -> bool:
        """Backward of a loss that was computed under :meth:`autocast`, and the step that is then due.

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
        if self.scaler is not None:
            norm = self.scaler.clip_and_step(self.optimizer, self.module, self.config.max_grad_norm)
        else:
            norm = self._clip_and_step()
        self.skipped = not math.isfinite(norm)
        self.grad_norm = None if self.skipped else norm
        self.training_steps += 1
        self.overflow_steps += self.skipped
        self.consecutive_skips = self.consecutive_skips + 1 if self.skipped else 0
        if self.scaler is None and self.consecutive_skips >= self.config.max_consecutive_skips:
            where = first_nonfinite_gradient(self.module.named_parameters())
            raise FloatingPointError(
                f"{self.consecutive_skips} updates in a row had no finite gradients in "
                f"{dtype_name(self.precision.compute)}, first non-finite gradient: {where}"
            )
        self.optimizer.zero_grad(set_to_none=True)

    def _clip_and_step(self) -> float:
        """As the scaler's, without a scale."""
        norm = gradient_norm(self.module, self.device)
        if norm.isfinite():
            torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), self.config.max_grad_norm, norm)
            self.optimizer.step()
        return norm.item()

    def get_stats(self) -> dict[str, Any]:
        """What happened so far, ready for a logger.

        ``training_steps`` are updates, ``overflow_steps`` those of them that were skipped. ``effective_dtype`` is the
        one in which most multiplications of the first forward were done, ``effective_dtype_share`` the share of each:
        observed, ``None`` before the first.
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
                "cast_model_to_fp16 with a loss scaler: these weights are the optimizer's masters, in float16 small "
                "updates are lost and Adam's epsilon is 0; autocast computes in float16 already. Cast a copy instead"
            )
        self._for_inference = True
        return self.module.half()

    def save_checkpoint(self, path: str | os.PathLike, extra: Optional[Mapping[str, Any]] = None) -> None:
        """Write model, optimizer, loss scaler, counters and provenance; whole, or not at all. DDP: every rank calls it.

        Gradients of an update that is being accumulated are not saved.

        Args:
            extra: tensors and plain Python values to come back from :meth:`load_checkpoint`.
        """
        if not dist.is_initialized() or dist.get_rank() == 0:
            path = Path(path)
            beside = path.with_name(path.name + ".part")
            torch.save(
                {
                    "version": VERSION,
                    "model": self.module.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "grad_scaler": self.scaler.state_dict() if self.scaler is not None else None,
                    "counters": {"training_steps": self.training_steps, "overflow_steps": self.overflow_steps},
                    "extra": dict(extra or {}),
                    "provenance": {
                        "config": asdict(self.config),
                        "stats": self.get_stats(),
                        "torch": str(torch.__version__),
                        "python": platform.python_version(),
                        "patch_stamp": patch_stamp(),
                    },
                },
                beside,
            )
            beside.replace(path)
        if dist.is_initialized():
            dist.barrier()

    def load_checkpoint(self, path: str | os.PathLike) -> dict[str, Any]:
        """Take up what :meth:`save_checkpoint` wrote; settings stay this trainer's.

        A checkpoint without a loss scale (of another dtype) loads with a warning.

        Returns:
            the ``extra`` that was saved.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: truncated, from a newer version, or of another model. Nothing was loaded.
        """
        saved = read_checkpoint(path, self.device)
        _check_model(saved["model"], self.module.state_dict(), path)
        _check_optimizer(saved["optimizer"], self.optimizer.state_dict(), path)
        try:
            load_scaler_state(self.scaler, saved.get("grad_scaler"), str(path))
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        self.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.zero_grad(set_to_none=True)
        self._micro_steps = 0
        counters = saved.get("counters", {})
        self.training_steps, self.overflow_steps = (
            counters.get(name, 0) for name in ("training_steps", "overflow_steps")
        )
        return saved.get("extra", {})


def read_checkpoint(path: str | os.PathLike, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a checkpoint of :class:`FP16Trainer` holds.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: truncated, no checkpoint, or from a newer version.
    """
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: truncated, or no checkpoint ({str(error).splitlines()[0]})") from None
    if not isinstance(saved, dict) or not {"model", "optimizer"} <= saved.keys():
        raise CheckpointError(f"{path}: no checkpoint of this trainer: it has no model or no optimizer")
    if saved.get("version", VERSION) > VERSION:
        raise CheckpointError(f"{path}: version {saved['version']}, this trainer reads up to {VERSION}: update it")
    return saved


def _check_model(saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], path: Any) -> None:
    for name in sorted(saved.keys() ^ own.keys()):
        raise CheckpointError(f"{path}: of another model: {name} is in {'it' if name in saved else 'this model'} alone")
    for name, tensor in own.items():
        if saved[name].shape != tensor.shape:
            shapes = f"{tuple(saved[name].shape)}, here {tuple(tensor.shape)}"
            raise CheckpointError(f"{path}: of another model: {name} has shape {shapes}")


def _check_optimizer(saved: Mapping[str, Any], own: Mapping[str, Any], path: Any) -> None:
    sizes, wanted = ([len(group["params"]) for group in state["param_groups"]] for state in (saved, own))
    if sizes != wanted:
        raise CheckpointError(f"{path}: of another optimizer: groups of {sizes} parameters, here {wanted}")
