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
"""Scale the loss of fp16 training: settings, scaler, checkpointed state."""

import ctypes
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from .gradients import first_nonfinite_gradient, gradient_norm, local_shard


@dataclass(frozen=True)
class GradScalerConfig:
    """Settings of the loss scaler (``fsdp_config.grad_scaler``, ``critic.fsdp.grad_scaler``).

    Args:
        init_scale: first loss scale (dimensionless).
        growth_factor: factor of the scale after ``growth_interval`` clean steps in a row.
        backoff_factor: factor of the scale after an overflow.
        growth_interval: clean optimizer steps before the scale grows; 400 since verl PR #4036.
        min_scale: floor of the scale. torch has none: after ~150 overflows its scale is 0 and every step is skipped.
        max_consecutive_skips: number of skipped steps in a row that ends the run with :class:`LossScaleError`.

    Raises:
        ValueError: the message names the key, its value and what is allowed.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 400
    min_scale: float = 1.0
    max_consecutive_skips: int = 32

    @classmethod
    def read(cls, settings: "GradScalerConfig | Mapping[str, Any] | None") -> "GradScalerConfig":
        """Return the settings of a config's node: built already, as a mapping with ``_target_``, or missing."""
        if isinstance(settings, cls):
            return settings
        return cls(**{key: value for key, value in (settings or {}).items() if key != "_target_"})

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
        for key, (met, allowed) in rules.items():
            if not met:
                raise ValueError(f"grad_scaler.{key}={getattr(self, key)} must be {allowed}")


class LossScaleError(RuntimeError):
    """The loss still overflows after ``max_consecutive_skips`` steps in a row."""


def check_overflow(device: str) -> None:
    """Check that fp16 overflows to inf or NaN on ``device``; elsewhere no loss scaler can detect an overflow.

    Ascend's saturation mode gives 65504 for inf and 0 for NaN (CANN, ``INF_NAN_MODE_ENABLE``).

    Args:
        device: of a worker, whose current device is used.

    Raises:
        ValueError: an operation gave a finite number.
    """
    large = torch.full((1, 1), 2.0**15, dtype=torch.float16, device=device)
    results = {
        "a product": large * 4,
        "a matrix product": large @ large,
        "a cast from fp32": (large.float() * 4).half(),
    }
    for operation, result in results.items():
        if result.isfinite().item():
            raise ValueError(
                f"no loss scaling on device {device}: {operation} that overflows fp16 gives {result.item():g}, not "
                "inf; on an Ascend NPU set INF_NAN_MODE_ENABLE=1, or train in bf16 or fp32 where it has no such mode"
            )


def storm_message(config: GradScalerConfig, loss_scale: float) -> str:
    """Return the beginning of a :class:`LossScaleError`'s message."""
    return (
        f"{config.max_consecutive_skips} optimizer steps in a row overflowed (grad_scaler.max_consecutive_skips), "
        f"loss scale {loss_scale:g}"
    )


class LossScaler(ShardedGradScaler):
    """Dynamic loss scaling for FSDP1, FSDP2 and plain modules, on any device.

    Call ``scale(loss).backward()``, then :meth:`clip_and_step`. A step costs one pass over the gradients for their
    norm, one to apply them, one scalar all-reduce, and one value that the host reads, the norm. torch's own sequence
    (``unscale_``, clip, ``step``, ``update``) works too, unless parameters are offloaded to the CPU.

    Unlike torch's ``ShardedGradScaler`` it scales in fp32 (an fp16 loss times 65536 overflows), has a floor, records
    after each step whether it was ``skipped``, and keeps settings out of its state, so that a resumed run takes them
    from its config.

    Args:
        config: the settings.
        device: device type of the worker (cuda, cpu, …); torch's default of cuda disables the scaler elsewhere.

    Raises:
        ValueError: torch does not scale on ``device`` here, or the device saturates where fp16 overflows.
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
        check_overflow(device)
        self.config = config
        self.skipped = False
        self.consecutive_skips = 0
        self._set(config.init_scale, 0)

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale, in fp32."""
        return super().scale(outputs.float())

    def get_scale(self) -> float:
        """Return the current scale, without reading it from the device."""
        return self._init_scale

    def clip_and_step(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module, max_norm: float) -> float:
        """Clip the gradients of ``module`` and take the optimizer's step, or skip it; then adapt the scale.

        Every rank must call it. Clip coefficient and inverse scale are one factor; fused optimizers apply it themselves
        and skip on the device.

        Args:
            max_norm: largest norm of the unscaled gradients.

        Returns:
            The norm of the unscaled gradients before clipping; inf or NaN where the step was skipped.

        Raises:
            LossScaleError: this was the last of ``max_consecutive_skips`` skips in a row.
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
                gradients = [local_shard(p.grad) for p in _optimized(optimizer) if p.grad is not None]
                if gradients:  # a rank may have only padding
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
        """Divide the gradients by the scale; set ``skipped`` where one of any rank is inf or NaN.

        Raises:
            ValueError: a gradient is on another device than the scale, whose copy torch would read before it arrives.
        """
        device = None if self._scale is None else self._scale.device.type  # torch refuses None below
        found = {p.grad.device.type for p in _optimized(optimizer) if p.grad is not None}
        if device and (elsewhere := found - {device}):
            raise ValueError(f"gradients on {elsewhere.pop()}, loss scale on {device}: call clip_and_step instead")
        super().unscale_(optimizer)
        found = self._found_inf_per_device(optimizer)
        for device, summed in found.items():
            # torch sums over ranks, in shape (1,); its fused optimizers take shape () and skip at exactly 1.
            found[device] = summed.clamp(max=1.0).squeeze()
        self.skipped = any(one.item() for one in found.values())

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Optional[float]:
        """Take the optimizer's step unless a gradient of any rank is inf or NaN, after :meth:`unscale_`."""
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)  # torch leaves it to a fused optimizer, which looks only at its own rank
        return super().step(optimizer, *args, **kwargs)

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
        # torch makes its tensors of these two at the first loss; the host's copies save a synchronisation.
        self._init_scale, self._init_growth_tracker = ctypes.c_float(scale).value, clean_steps
        if self._scale is not None:
            self._scale.fill_(scale)
            self._growth_tracker.fill_(clean_steps)

    def state_dict(self) -> Optional[dict[str, Any]]:
        """Return ``scale`` (float), ``_growth_tracker`` and ``consecutive_skips`` (int).

        ``None`` after a storm, in which no scale worked: a run resumed from its checkpoint starts at ``init_scale``.
        """
        if self.consecutive_skips >= self.config.max_consecutive_skips:
            return None
        return {
            "scale": self.get_scale(),
            "_growth_tracker": self._init_growth_tracker,
            "consecutive_skips": self.consecutive_skips,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        Raises:
            ValueError: a key is missing or unknown, the scale is outside of fp32, or a count is below 0.
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


def _optimized(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def load_scaler_state(scaler: Optional[LossScaler], state: Optional[Mapping[str, Any]], source: str) -> None:
    """Restore a scaler from a checkpoint's ``grad_scaler`` entry; warn where only one of the two exists.

    Args:
        source: the checkpoint file, for the messages.

    Raises:
        ValueError: the state does not fit; the message names ``source``.
    """
    if scaler is not None and state is not None:
        try:
            scaler.load_state_dict(state)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
    elif scaler is not None:
        warnings.warn(f"{source} contains no loss scale: starting at {scaler.get_scale():g}", stacklevel=2)
    elif state is not None:
        warnings.warn(f"{source} contains a loss scale, which this run does not use (no fp16 training)", stacklevel=2)
