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
"""Resolve and check the configs of the workers and SFT trainers of verl up to 0.7.1, plain mappings without an engine.

``Precision.of_worker``, :func:`worker_scaler` and :func:`sft_precision` serve the workers; :func:`check_workers` and
:func:`check_sft` refuse bad values in the driver.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Optional

import torch

from .dtypes import UNREQUESTED, Precision, dtype_name, join_dtypes, to_dtype
from .roles import REQUESTED_ROLLOUTS, check_rollout_dtype, run_requests_precision, select
from .scaler import GradScalerConfig, LossScaler

# Role, the engine's key below it, the key of its model, and whether it is trained.
_WORKERS = (
    ("actor_rollout_ref.actor", "fsdp_config", "actor_rollout_ref.model", True),
    ("actor_rollout_ref.ref", "fsdp_config", "actor_rollout_ref.model", False),
    ("critic", "model.fsdp_config", "critic.model", True),
    ("reward_model", "model.fsdp_config", "reward_model.model", False),
)


def worker_scaler(fsdp_config: Mapping[str, Any], precision: Precision, device: str) -> Optional[LossScaler]:
    """Return the loss scaler of a worker, ``None`` where its precision needs none.

    Args:
        fsdp_config: its ``grad_scaler`` contains the settings; any key may be missing.
        precision: :meth:`Precision.of_worker` of the same ``fsdp_config``.
        device: device type of the worker (cuda, cpu, …).
    """
    return LossScaler(GradScalerConfig.read(fsdp_config.get("grad_scaler")), device) if precision.loss_scaling else None


def rollout_precision(dtype: Optional[str]) -> Precision:
    """Return the precision in which the HF rollout samples: that of ``rollout.dtype``, if it requests one.

    Raises:
        ValueError: the dtype is a name of a server that autocast does not take.
    """
    return Precision.of_worker(dtype, {}, trained=False) if dtype in REQUESTED_ROLLOUTS else UNREQUESTED


def check_workers(config: Mapping[str, Any]) -> None:
    """Refuse, in the driver, a PPO config that requests a precision that the workers cannot compute in.

    Every role of the config is checked, whether or not the algorithm uses it; without a request none is.

    Raises:
        ValueError: the message names the key, its value and what is allowed.
    """
    if not run_requests_precision(config):
        return
    model_engine = config["trainer"].get("use_legacy_worker_impl") == "disable"
    for role, fsdp_key, model_key, trained in _WORKERS:
        worker = select(config, role)
        if worker is None or select(worker, "strategy") is None:
            continue  # a release without this worker
        strategy, dtype = worker["strategy"], worker.get("dtype")
        if strategy not in ("fsdp", "fsdp2"):  # Megatron's own key, megatron.dtype, stays as upstream has it
            if dtype is not None and to_dtype(dtype, f"{role}.dtype") != torch.bfloat16:
                raise ValueError(
                    f"{role}.dtype={dtype} does not reach strategy={strategy} on this release, whose loss scaler ends "
                    f"the run at the first overflow: choose fsdp or fsdp2, or leave {role}.dtype null"
                )
            continue
        engine = select(worker, fsdp_key) or {}
        with _below(role):
            join_dtypes(dtype, fsdp_key, engine)
        with _below(f"{role}.{fsdp_key}"):
            precision = Precision.of_worker(dtype, engine, trained, _trains_adapters(select(config, model_key) or {}))
        if model_engine:
            with _below(role):
                _check_bfloat16_only((dtype, precision.compute), "trainer.use_legacy_worker_impl=disable", "auto")
    rollout = config["actor_rollout_ref"]["rollout"]
    check_rollout_dtype(rollout["dtype"])
    if rollout.get("name") == "hf":
        with _below("actor_rollout_ref.rollout"):
            _check_hf_rollout(rollout["dtype"], config["actor_rollout_ref"]["actor"])


def _trains_adapters(model: Mapping[str, Any]) -> bool:
    return model.get("lora_rank", 0) > 0 or model.get("lora_adapter_path") is not None


def _check_hf_rollout(dtype: str, actor: Mapping[str, Any]) -> None:
    """Check the HF rollout, which samples under autocast (no "auto", no "half") from the weights that FSDP2 gathers."""
    precision = Precision.of_worker(actor.get("dtype"), actor.get("fsdp_config") or {}, True)
    sampled, trained = to_dtype(dtype, "dtype"), precision.compute
    if actor["strategy"] == "fsdp2" and sampled != trained:
        raise ValueError(
            f"dtype={dtype} with name=hf, whose weights FSDP2 rounds to the actor's {dtype_name(trained)} before: set "
            f"dtype={dtype_name(trained)}, or choose strategy fsdp or another rollout"
        )


def sft_precision(config: Mapping[str, Any]) -> Precision:
    """Resolve the config of ``fsdp_sft_trainer``, the SFT trainer without an engine of verl up to 0.7.0.

    Raises:
        ValueError: as :meth:`Precision.of_worker`.
    """
    model, lora = config["model"], _trains_adapters(config["model"])
    return Precision.of_worker(config.get("dtype"), model["fsdp_config"], True, lora, "model.fsdp_config")


def check_sft(config: Mapping[str, Any]) -> None:
    """Refuse a dtype that the SFT trainers on the model engine would ignore, ``+precision=fp16`` included.

    Raises:
        ValueError: the message names the key, its value and what is allowed.
    """
    engine, dtypes = config["engine"], [select(config, "actor_rollout_ref.actor.dtype")]
    if engine.get("strategy") in ("fsdp", "fsdp2"):
        dtypes.append(Precision.of_worker(None, engine, False).compute)
    with _below("engine"):
        _check_bfloat16_only(dtypes, "SFT on the model engine", "verl.trainer.fsdp_sft_trainer, a later release")


def _check_bfloat16_only(dtypes: Iterable[Any], why: str, instead: str) -> None:
    for dtype in dtypes:
        if dtype is not None and to_dtype(dtype, "dtype") != torch.bfloat16:
            raise ValueError(
                f"dtype={dtype_name(to_dtype(dtype, 'dtype'))} is not what {why} trains in on this release, which is "
                f"bfloat16 without a loss scaler: choose {instead}, or dtype bfloat16"
            )


@contextmanager
def _below(key: str) -> Iterator[None]:
    """Prefix the key that an error of the body begins with by the path of its config node."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from error
