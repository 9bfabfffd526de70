"""Settings of :class:`recipes.amp.trainer.FP16Trainer`, and the precision that they resolve to on a device."""

from dataclasses import dataclass
from typing import Optional

import torch

from recipes.amp.options import check_values
from verl.utils.precision import GradScalerConfig, Precision, dtype_name, to_dtype

SCALER_KEYS = ("growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_consecutive_skips")


@dataclass(frozen=True)
class FP16TrainingConfig:
    """Settings of training.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """

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
        switch = (lambda value: isinstance(value, bool), "True or False")
        norm = (lambda value: type(value) in (int, float) and value > 0, "a positive number; inf does not clip")
        count = (lambda value: type(value) is int and value >= 1, "a whole number of at least 1")
        check_values(self, {"enabled": switch, "on_cpu": switch, "max_grad_norm": norm, "accumulation_steps": count})

    @property
    def scaler(self) -> GradScalerConfig:
        """Return the settings of the loss scaler."""
        return GradScalerConfig(init_scale=self.loss_scale, **{key: getattr(self, key) for key in SCALER_KEYS})


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
