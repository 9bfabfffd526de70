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
"""Translate the settings of the loss scaler for Megatron, which has its own."""

from typing import Any

from .scaler import GradScalerConfig


def megatron_scaler(config: GradScalerConfig) -> dict[str, Any]:
    """Return the settings as keyword arguments of Megatron's ``OptimizerConfig``.

    ``megatron/core/optimizer/__init__.py`` builds the scaler with growth factor 2 and backoff factor 0.5.

    Raises:
        ValueError: a growth or backoff factor differs from Megatron's fixed one.
    """
    for key, fixed in (("growth_factor", 2.0), ("backoff_factor", 0.5)):
        if getattr(config, key) != fixed:
            raise ValueError(f"grad_scaler.{key}={getattr(config, key)}: Megatron's loss scaler supports only {fixed}")
    return {
        "initial_loss_scale": config.init_scale,
        "min_loss_scale": config.min_scale,
        "loss_scale_window": config.growth_interval,
        "hysteresis": 1,  # Megatron's 2 keeps the scale after the first overflow
    }
