"""Settings of :class:`recipes.amp.trainer.FP16Trainer`, and the precision that they resolve to on a device."""

from dataclasses import dataclass
from typing import Optional

import torch

from verl.utils.precision import GradScalerConfig, Precision, dtype_name, to_dtype


@dataclass(frozen=True)
class FP16TrainingConfig:
    """Settings of training; the scaler's are those of ``verl.utils.precision.GradScalerConfig``.

    Args:
        enabled: ``False`` trains in float32.
        dtype: what autocast computes in: float16, bfloat16 or float32.
        on_cpu: compute in ``dtype`` on a CPU too. Otherwise a model there is trained in float32, which the trainer
            warns of and records: most CPUs multiply 16 bits slowly.
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


def resolve_precision(config: FP16TrainingConfig, device: torch.device) -> tuple[Precision, Optional[str]]:
    """Return the precision on ``device`` and, where it is not the requested one, the reason."""
    compute, fallback = to_dtype(config.dtype if config.enabled else "float32", "dtype"), None
    if compute != torch.float32 and device.type == "cpu" and not config.on_cpu:
        fallback = f"the model is on the CPU: training in float32, not {dtype_name(compute)} (to train in "
        fallback += f"{dtype_name(compute)} anyway: on_cpu=True, or a recipe's --device cpu)"
    elif compute == torch.bfloat16 and device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name(device)
            fallback = f"{name} has no bfloat16: training in float32 (float16 would work there)"
    if fallback is not None:
        compute = torch.float32
    single = dict.fromkeys(("reduce", "buffer", "master", "base"), torch.float32)
    return Precision(compute=compute, **single, loss_scaling=compute == torch.float16), fallback
