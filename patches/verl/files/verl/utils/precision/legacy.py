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
from types import SimpleNamespace
from typing import Any, Optional

import torch

from .dtypes import Precision, dtype_name, to_dtype
from .roles import check_role_dtype, check_rollout_dtype
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
    return LossScaler(_scaler_settings(fsdp_config), device) if precision.loss_scaling else None


def _scaler_settings(fsdp_config: Mapping[str, Any]) -> GradScalerConfig:
    settings = fsdp_config.get("grad_scaler") or {}
    if isinstance(settings, GradScalerConfig):  # instantiated by Hydra, where the config has dataclasses
        return settings
    return GradScalerConfig(**{key: value for key, value in settings.items() if key != "_target_"})


def check_workers(config: Mapping[str, Any]) -> None:
    """Refuse, in the driver, a PPO config that the workers cannot compute in.

    Every role of the config is checked, whether or not the algorithm uses it.

    Raises:
        ValueError: the message names the key, its value and what is allowed.
    """
    model_engine = config["trainer"].get("use_legacy_worker_impl") == "disable"
    for role, fsdp_key, model_key, trained in _WORKERS:
        worker = _select(config, role)
        if worker is None or _select(worker, "strategy") is None:
            continue  # a release without this worker
        strategy, dtype = worker["strategy"], worker.get("dtype")
        if strategy not in ("fsdp", "fsdp2"):  # Megatron's own key, megatron.dtype, stays as upstream has it
            if dtype is not None and to_dtype(dtype, f"{role}.dtype") != torch.bfloat16:
                raise ValueError(
                    f"{role}.dtype={dtype} does not reach strategy={strategy} on this release, whose loss scaler ends "
                    f"the run at the first overflow: choose fsdp or fsdp2, or leave {role}.dtype null"
                )
            continue
        engine = _select(worker, fsdp_key) or {}
        with _below(f"{role}.{fsdp_key}"):
            precision = Precision.of_worker(engine, trained, _trains_adapters(_select(config, model_key) or {}))
            _scaler_settings(engine)
        with _below(role):
            if model_engine:
                _check_bfloat16_alone((dtype, precision.compute), "trainer.use_legacy_worker_impl=disable", "auto")
            _check_wire(dtype, fsdp_key, precision)
    rollout = config["actor_rollout_ref"]["rollout"]
    with _below("actor_rollout_ref.rollout"):
        check_rollout_dtype(rollout["dtype"])
        if rollout.get("name") == "hf":
            _check_hf_rollout(rollout["dtype"], config["actor_rollout_ref"]["actor"])


def _trains_adapters(model: Mapping[str, Any]) -> bool:
    return model.get("lora_rank", 0) > 0 or model.get("lora_adapter_path") is not None


def _check_wire(dtype: Optional[str], fsdp_key: str, precision: Precision) -> None:
    check_role_dtype(dtype, fsdp_key, SimpleNamespace(dtype=dtype_name(precision.compute), strategy=None))


def _check_hf_rollout(dtype: str, actor: Mapping[str, Any]) -> None:
    """Check the HF rollout, which samples under autocast (no "auto", no "half") from the weights that FSDP2 gathers."""
    sampled, trained = to_dtype(dtype, "dtype"), Precision.of_worker(_select(actor, "fsdp_config") or {}, True).compute
    if actor["strategy"] == "fsdp2" and sampled != trained:
        raise ValueError(
            f"dtype={dtype} with name=hf, whose weights FSDP2 rounds to the actor's {dtype_name(trained)} before: set "
            f"dtype={dtype_name(trained)}, or choose strategy fsdp or another rollout"
        )


def sft_precision(config: Mapping[str, Any]) -> Precision:
    """Resolve the config of ``fsdp_sft_trainer``, the SFT trainer without an engine of verl up to 0.7.0.

    Raises:
        ValueError: as :meth:`Precision.resolve`; ``dtype`` and ``model.fsdp_config`` contradict each other.
    """
    model = config["model"]
    precision = Precision.of_worker(model["fsdp_config"], trained=True, lora=_trains_adapters(model))
    _check_wire(config["dtype"], "model.fsdp_config", precision)
    return precision


def check_sft(config: Mapping[str, Any]) -> None:
    """Refuse a dtype that the SFT trainers on the model engine would ignore, ``+precision=fp16`` included.

    Raises:
        ValueError: the message names the key, its value and what is allowed.
    """
    engine, dtypes = config["engine"], [_select(config, "actor_rollout_ref.actor.dtype")]
    if engine.get("strategy") in ("fsdp", "fsdp2"):
        dtypes.append(Precision.of_worker(engine, False).compute)
    with _below("engine"):
        _check_bfloat16_alone(dtypes, "SFT on the model engine", "verl.trainer.fsdp_sft_trainer, a later release")


def _check_bfloat16_alone(dtypes: Iterable[Any], why: str, instead: str) -> None:
    for dtype in dtypes:
        if dtype is not None and to_dtype(dtype, "dtype") != torch.bfloat16:
            raise ValueError(
                f"dtype={dtype_name(to_dtype(dtype, 'dtype'))} is not what {why} trains in on this release, which is "
                f"bfloat16 alone and without a loss scaler: choose {instead}, or dtype bfloat16"
            )


def _select(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, ``None`` where there is none."""
    for key in path.split("."):
        config = config.get(key) if config is not None else None
    return config


@contextmanager
def _below(key: str) -> Iterator[None]:
    """Prefix the key that an error of the body begins with by the path of its config node."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from error
