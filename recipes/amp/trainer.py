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
import platform
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch._dynamo import OptimizedModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

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

VERSION = 1  # of a checkpoint's layout
LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
PARAMETER_SHAPED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}  # state of Adam and SGD
RNN_LAYERS = (torch.ops.aten._cudnn_rnn, torch.ops.aten.mkldnn_rnn_layer)  # one operation each, without a FLOP formula


class CheckpointError(ValueError):
    """A checkpoint that this trainer cannot take up; the message names the file and why. Nothing was loaded."""


@dataclass(frozen=True)
class FP16TrainingConfig:
    """How to train; the scaler's settings are those of ``verl.utils.precision.GradScalerConfig``.

    Args:
        enabled: ``False`` trains in float32.
        dtype: what autocast computes in: float16, bfloat16 or float32.
        on_cpu: compute in ``dtype`` on a CPU too. Otherwise a model there is trained in float32, which the trainer says
            and records: most CPUs multiply 16 bits slowly.
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
        for key in ("enabled", "on_cpu"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"{key}={getattr(self, key)!r} must be True or False")
        to_dtype(self.dtype, "dtype")
        try:
            self.scaler  # noqa: B018
        except ValueError as error:  # by the names of this config
            raise ValueError(str(error).replace("grad_scaler.", "").replace("init_scale", "loss_scale")) from None
        norm = self.max_grad_norm
        if isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm > 0:
            raise ValueError(f"max_grad_norm={norm} must be a positive number; inf does not clip")
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
    """Counts the floating-point operations of matrix products, convolutions, attention and RNNs, by dtype.

    What a config asks for, and the dtype of an output, both mislead: autocast casts some operations alone, and a GRU's
    output is fp32 where its products are fp16.
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
        elif operation._overloadpacket in RNN_LAYERS:
            steps = args[0][..., 0].numel()  # (T, N, F), or packed (T · N, F)
            weights = [leaf for leaf in tree_leaves(args[1:5]) if isinstance(leaf, torch.Tensor) and leaf.ndim == 2]
            self.flops[dtype_name(args[0].dtype)] += 2 * steps * sum(weight.numel() for weight in weights)
        return out

    def shares(self) -> dict[str, float]:
        """The share of the operations in each dtype, the largest first; empty where none was seen."""
        return {dtype: flops / self.flops.total() for dtype, flops in self.flops.most_common()}


def _resolve(config: FP16TrainingConfig, device: torch.device) -> tuple[Precision, Optional[str]]:
    """The precision on this device, and why it is not the one asked for (or ``None``)."""
    compute, fallback = to_dtype(config.dtype if config.enabled else "float32", "dtype"), None
    if compute != torch.float32 and device.type == "cpu" and not config.on_cpu:
        fallback = f"the model is on the CPU: training in float32, not {dtype_name(compute)} (on_cpu=True insists; "
        fallback += "a recipe's --device cpu)"
    elif compute == torch.bfloat16 and device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name(device)
            fallback = f"{name} has no bfloat16: training in float32 (float16 would work there)"
    if fallback is not None:
        compute = torch.float32
    return Precision(compute, torch.float32, torch.float32, torch.float32, compute == torch.float16), fallback


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, str]:
    """The parameters' names, of a module and an optimizer that train the same, in float32."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    trained = set(_parameters(optimizer))
    if not trained <= names.keys():
        raise ValueError("the optimizer holds parameters that are not the model's: their overflows would go unseen")
    for parameter, name in names.items():
        if parameter.requires_grad and parameter not in trained:
            raise ValueError(
                f"{name} requires a gradient and is not in the optimizer, so nothing would clear it: add it there, or "
                "freeze it with requires_grad_(False)"
            )
        if parameter in trained and parameter.dtype != torch.float32:
            raise ValueError(
                f"{name} is {dtype_name(parameter.dtype)}: the optimizer's weights are the masters and must be "
                "float32; leave out .half(), autocast casts where it pays"
            )
    return names


class FP16Trainer:
    """Owns an optimizer's steps: autocast, loss scale, accumulation, clipping, skipping, and the count of all that.

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
        self._names = _names(self.module, optimizer)
        self.device = _parameters(optimizer)[0].device
        self.precision, self.fallback = _resolve(config, self.device)
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
        """Autocast to the trainer's dtype, for the forward and the loss; the first time it sees what that does.

        ``backward`` belongs outside, and so does whatever changes the weights: until the region ends, autocast computes
        with the 16-bit copies that it made of them first. What is compiled runs eagerly the first time, to be seen.
        """
        with self.precision.autocast(self.device.type):
            if self._shares:
                yield
            else:
                # Under a dispatch mode alone, dynamo would give up what is compiled for good.
                with torch.compiler.set_stance("force_eager"), MultiplicationDtypes() as seen:
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
        alone = self._ddp is not None and not last
        with self._ddp.no_sync() if alone else nullcontext():  # around the forward too, as DDP asks
            with self.autocast():
                loss = compute_loss_fn(self.model, batch)
            self.backward_and_step(loss)
        return loss.detach().float()

    def backward_and_step(self, loss: torch.Tensor) -> bool:
        """Backward of a loss that was computed under :meth:`autocast`, and the step that is then due.

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
        """As the scaler's, without a scale."""
        if self.consecutive_skips >= self.config.max_consecutive_skips:
            where = first_nonfinite_gradient(self.module.named_parameters())
            raise FloatingPointError(
                f"{self.consecutive_skips} updates in a row had no finite gradients in "
                f"{dtype_name(self.precision.compute)} (max_consecutive_skips), first non-finite gradient: {where}"
            )

    def _clip_and_step(self) -> float:
        """As the scaler's, without a scale."""
        norm = gradient_norm(self.module, self.device)
        result = norm.item()
        if math.isfinite(result):
            torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), self.config.max_grad_norm, norm)
            self.optimizer.step()
        return result

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

        Raises:
            ValueError: ``extra`` holds something else, or the weights were cast for inference.
        """
        extra = dict(extra or {})
        _check_plain(extra, "extra")
        if self._for_inference:
            raise ValueError("the model was cast to float16 for inference: a checkpoint holds the float32 weights")
        try:
            if not dist.is_initialized() or dist.get_rank() == 0:
                self._write(Path(path), extra)
        finally:  # the others are not left waiting for a rank that could not write
            if dist.is_initialized():
                dist.barrier()

    def _write(self, path: Path, extra: dict[str, Any]) -> None:
        beside = path.with_name(path.name + ".part")
        counters = ("training_steps", "overflow_steps", "consecutive_skips")
        saved = {
            "version": VERSION,
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_of": self._optimizer_of(),
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
        try:
            torch.save(saved, beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def load_checkpoint(self, path: str | os.PathLike) -> dict[str, Any]:
        """Take up what :meth:`save_checkpoint` wrote. The config stays this trainer's, and so does the optimizer's
        implementation (``fused``, ``foreach``); its learning rate and the like are the checkpoint's.

        A checkpoint without a loss scale (of another dtype, or of a run that ended in :class:`LossScaleError`) loads
        with a warning, and the scale starts anew.

        Returns:
            the ``extra`` that was saved, on the CPU.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: truncated, from a newer version, or of another model or optimizer. Nothing was loaded.
        """
        saved = read_checkpoint(path)
        _check_model(saved["model"], self.module.state_dict(), path)
        groups = self._check_optimizer(saved, path)
        scaler = self._new_scaler()
        try:
            load_scaler_state(scaler, saved.get("grad_scaler"), str(path))
        except ValueError as error:
            raise CheckpointError(str(error)) from None
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

    def _optimizer_of(self) -> dict[str, Any]:
        """Which optimizer over which parameters: its state goes by position alone."""
        groups = [[self._names[parameter] for parameter in group["params"]] for group in self.optimizer.param_groups]
        return {"class": type(self.optimizer).__name__, "groups": groups}

    def _check_optimizer(self, saved: Mapping[str, Any], path: Any) -> list[dict[str, Any]]:
        """The checkpoint's parameter groups, with this optimizer's implementation."""
        state, own = saved["optimizer"], self.optimizer.state_dict()
        sizes, wanted = ([len(group["params"]) for group in each["param_groups"]] for each in (state, own))
        if sizes != wanted:
            raise CheckpointError(f"{path}: of another optimizer: groups of {sizes} parameters, here {wanted}")
        of, own_of = saved["optimizer_of"] or self._optimizer_of(), self._optimizer_of()
        if of["class"] != own_of["class"]:
            raise CheckpointError(f"{path}: of another optimizer: {of['class']}, here {own_of['class']}")
        if of["groups"] != own_of["groups"]:
            raise CheckpointError(f"{path}: of another optimizer: its parameters are in another order or other groups")
        places = [place for group in state["param_groups"] for place in group["params"]]
        for place, parameter in zip(places, _parameters(self.optimizer), strict=True):
            for key, value in state["state"].get(place, {}).items():
                if key in PARAMETER_SHAPED and value is not None and value.shape != parameter.shape:
                    shapes = f"{tuple(value.shape)}, {self._names[parameter]} has {tuple(parameter.shape)}"
                    raise CheckpointError(f"{path}: of another optimizer: {key} has shape {shapes}")
        chosen = [{key: group[key] for key in ("foreach", "fused") if key in group} for group in own["param_groups"]]
        return [group | kept for group, kept in zip(state["param_groups"], chosen, strict=True)]


def read_checkpoint(path: str | os.PathLike, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a checkpoint of :class:`FP16Trainer` holds.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: truncated, no checkpoint, or from a newer version.
    """
    with open(path, "rb") as file:
        try:
            saved = torch.load(file, map_location=device, weights_only=True)
        except Exception as error:  # whatever the bytes lead torch's reader to, OSError among it
            raise CheckpointError(f"{path}: truncated, or no checkpoint") from error
    holds = isinstance(saved, dict) and all(isinstance(saved.get(part), Mapping) for part in ("model", "optimizer"))
    if not holds or not saved["optimizer"].keys() >= {"state", "param_groups"}:
        raise CheckpointError(f"{path}: no checkpoint of this trainer: it has no model or no optimizer")
    version = saved.get("version", VERSION)
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise CheckpointError(f"{path}: version {version}, this trainer reads up to {VERSION}: update it")
    optional = ("optimizer_of", "counters", "extra", "provenance")  # checkpoints of others may lack them
    for part in optional:
        if not isinstance(saved.setdefault(part, {}), Mapping):
            raise CheckpointError(f"{path}: no checkpoint of this trainer: its {part} is {type(saved[part]).__name__}")
    return saved


def _check_model(saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], path: Any) -> None:
    for name in sorted(saved.keys() ^ own.keys()):
        raise CheckpointError(f"{path}: of another model: {name} is in {'it' if name in saved else 'this model'} alone")
    for name, tensor in own.items():
        found, wanted = (getattr(value, "shape", None) for value in (saved[name], tensor))  # extra state has none
        if found != wanted:
            raise CheckpointError(f"{path}: of another model: {name} has shape {_shape(found)}, here {_shape(wanted)}")


def _shape(shape: Optional[torch.Size]) -> str:
    return "none" if shape is None else str(tuple(shape))


def _check_plain(value: Any, where: str) -> None:
    """Refuse what ``torch.load`` would refuse to read back."""
    if type(value) in (dict, OrderedDict, Counter):
        for key, each in value.items():
            _check_plain(key, f"{where} (a key)")
            _check_plain(each, f"{where}.{key}")
    elif type(value) in (list, tuple, set):
        for place, each in enumerate(value):
            _check_plain(each, f"{where}.{place}")
    elif not isinstance(value, torch.Tensor) and type(value) not in PLAIN:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ValueError(f"{where} is of {kind}: save tensors and plain Python values, a NumPy number as float(x)")
