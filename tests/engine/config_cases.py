"""Compose verl's ppo_trainer.yaml for lists of overrides and build the dataclasses of its driver and workers.

    config_cases.py MODEL_DIR REQUESTS_JSON OUT_JSON

A request is a name with overrides, which the driver refuses or the workers build.
"""

import json
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict

import verl
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.precision import requests_precision, run_requests_precision

MODEL = sys.argv[1]
BASE = [
    f"actor_rollout_ref.model.path={MODEL}",
    f"critic.model.path={MODEL}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
]


def ref_as_actor(ref: DictConfig) -> DictConfig:
    """Modify the ref's keys as ``ActorRolloutRefWorker.init_model`` does before it builds the dataclass."""
    with open_dict(ref):
        for key in [key for key in ref if key.startswith("log_prob_")]:
            ref.pop(key)
        ref.ppo_micro_batch_size_per_gpu = 1
    return ref


def outcome(overrides: list[str]) -> dict:
    try:
        config = compose("ppo_trainer", overrides=[*BASE, *overrides])
        validate_config(config, use_reference_policy=True, use_critic=True)
    except (HydraException, ValueError) as error:
        return {"error": str(error)}
    role = config.actor_rollout_ref
    engines = {
        "actor": omega_conf_to_dataclass(role.actor).engine,
        "ref": omega_conf_to_dataclass(ref_as_actor(role.ref)).engine,
        "critic": omega_conf_to_dataclass(config.critic).engine,
    }
    result = {"rollout": {"dtype": omega_conf_to_dataclass(role.rollout).dtype}}
    for name, engine in engines.items():
        result[name] = {"dtype": engine.dtype, "requested": requests_precision(engine)}
        result[name]["grad_scaler"] = vars(engine.grad_scaler)
        result[name]["keep"] = list(getattr(engine, "keep_fp32_modules", []))
    return {"roles": result, "run": run_requests_precision(config)}


with initialize_config_dir(f"{verl.__path__[0]}/trainer/config", version_base=None):
    requests = json.loads(Path(sys.argv[2]).read_text())
    Path(sys.argv[3]).write_text(json.dumps({name: outcome(overrides) for name, overrides in requests.items()}))
