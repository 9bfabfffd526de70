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
"""Precision of verl's training engines and rollouts: dtypes, the fp16 loss scaler, and what both report.

The package needs torch and the standard library only. verl's engines, workers and configs call it; it calls none of
them. Import from the package, not from its modules:

- ``dtypes``: :class:`Precision`, the dtypes of an engine, resolved once from its config.
- ``roles``: the dtype keys of actor, ref, critic and rollout, and whether a run requests a precision.
- ``scaler``: :class:`LossScaler` with its settings, :class:`GradScalerConfig`, and its checkpointed state.
- ``gradients``: the norm over all ranks, and the first gradient that is not finite.
- ``accounting``: :class:`StepAccounting` of skipped steps, and a checkpoint where they end the run.
- ``keep_fp32``: modules that stay in fp32 while the rest of the model computes in fp16.
- ``routers``: the routers among them, in the vLLM worker.
- ``wire``: weights on their way to the rollout, in its dtype.
- ``rewards``: refusal of rewards that are inf or NaN.
- ``megatron``: settings of the loss scaler that Megatron has itself.
- ``legacy``: configs of the workers and SFT trainers of verl up to 0.7.1.
- ``reporting``: one line of JSON a worker, with the stamp of the stack.

Why fp16: with it on both sides, the log-probabilities of trainer and rollout agree far better than with bf16 (Qi et
al. 2025, "Defeating the Training-Inference Mismatch via FP16", arXiv 2510.26788). fp16 needs a loss scale, whose
settings, state and metrics upstream does not have (its scaler: verl PRs #4036 and #6150).

Where no key requests a precision (:func:`requests_precision`, :func:`run_requests_precision`), upstream's lines run.
"""

from .accounting import StepAccounting, save_after_storm
from .dtypes import UNREQUESTED, Precision, cast_parameters, dtype_name, requests_precision, to_dtype
from .gradients import first_nonfinite_gradient, gradient_norm
from .keep_fp32 import KeptModules, fp32_wrap_policy, keep_in_fp32, shard_in_fp32
from .legacy import check_sft, check_workers, rollout_precision, sft_precision, worker_scaler
from .megatron import megatron_scaler
from .reporting import patch_stamp, report, report_kwargs, report_rollout, report_worker
from .rewards import check_rewards, label_fields
from .roles import (
    apply_engine_dtype,
    apply_role_dtype,
    check_master_dtype,
    check_rollout_dtype,
    run_requests_precision,
)
from .scaler import GradScalerConfig, LossScaleError, LossScaler, load_scaler_state
from .vllm_fp32 import args_with_fp32_modules, keep_routers_in_fp32
from .wire import set_wire_dtype, wire_kwargs

__all__ = [
    "UNREQUESTED",
    "GradScalerConfig",
    "KeptModules",
    "LossScaleError",
    "LossScaler",
    "Precision",
    "StepAccounting",
    "apply_engine_dtype",
    "apply_role_dtype",
    "args_with_fp32_modules",
    "cast_parameters",
    "check_master_dtype",
    "check_rewards",
    "check_rollout_dtype",
    "check_sft",
    "check_workers",
    "dtype_name",
    "first_nonfinite_gradient",
    "fp32_wrap_policy",
    "gradient_norm",
    "keep_in_fp32",
    "keep_routers_in_fp32",
    "label_fields",
    "load_scaler_state",
    "megatron_scaler",
    "patch_stamp",
    "report",
    "report_kwargs",
    "report_rollout",
    "report_worker",
    "requests_precision",
    "rollout_precision",
    "run_requests_precision",
    "save_after_storm",
    "set_wire_dtype",
    "sft_precision",
    "shard_in_fp32",
    "to_dtype",
    "wire_kwargs",
    "worker_scaler",
]
