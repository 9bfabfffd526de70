# Copyright 2025 Individual Contributor: the verl-precision authors
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
"""Precision of verl's training engines and rollouts: dtypes and the fp16 loss scaler.

The package needs only torch and the standard library. verl's engines, workers and configs call it; it calls none of
them. Import from the package, not from its modules:

- ``dtypes``: :class:`Precision`, the dtypes of an engine, resolved once from its config.
- ``roles``: the dtype keys of actor, ref, critic and rollout, and whether a run requests a precision.
- ``scaler``: :class:`LossScaler` with its settings, :class:`GradScalerConfig`, and its checkpointed state.
- ``gradients``: the norm over all ranks, and the first gradient that is not finite.
- ``accounting``: :class:`StepAccounting` of skipped steps, and a checkpoint where they end the run.
- ``wire``: weights on their way to the rollout, in its dtype.
- ``megatron``: settings of the loss scaler that Megatron has itself.

Why fp16: with it on both sides, the log-probabilities of trainer and rollout agree far better than with bf16 (Qi et
al. 2025, "Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788). fp16 needs a loss scale (verl PRs
#4036 and #6150).

Where no key requests a precision (:func:`requests_precision`, :func:`run_requests_precision`), verl computes as it does
without the package.
"""

from .accounting import StepAccounting, save_after_storm
from .dtypes import UNREQUESTED, Precision, dtype_name, requests_precision, to_dtype
from .gradients import first_nonfinite_gradient, gradient_norm
from .megatron import megatron_scaler
from .roles import apply_engine_dtype, apply_role_dtype, check_rollout_dtype, run_requests_precision
from .scaler import GradScalerConfig, LossScaleError, LossScaler, load_scaler_state
from .wire import set_wire_dtype, wire_kwargs

__all__ = [
    "UNREQUESTED",
    "GradScalerConfig",
    "LossScaleError",
    "LossScaler",
    "Precision",
    "StepAccounting",
    "apply_engine_dtype",
    "apply_role_dtype",
    "check_rollout_dtype",
    "dtype_name",
    "first_nonfinite_gradient",
    "gradient_norm",
    "load_scaler_state",
    "megatron_scaler",
    "requests_precision",
    "run_requests_precision",
    "save_after_storm",
    "set_wire_dtype",
    "to_dtype",
    "wire_kwargs",
]
