"""Configuration keys: dtypes that they resolve to, defaults that follow other keys, and refusals.

The conformance suite records what upstream accepts silently.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
MIXED = f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype"
SCALER = f"{ACTOR}.fsdp_config.grad_scaler"
KEEP = f"{ACTOR}.fsdp_config.keep_fp32_modules"
FP16, MEGATRON = "+precision=fp16", "model_engine=megatron"


def all_in(dtype: str, **others: str) -> dict[str, str]:
    return dict.fromkeys(("actor", "ref", "critic", "rollout"), dtype) | others


RESOLVED = {
    "verl's default": ([], all_in("bfloat16")),
    "fp16": ([FP16], all_in("float16")),
    "bf16": (["+precision=bf16"], all_in("bfloat16")),
    "fp32": (["+precision=fp32"], all_in("float32")),
    "bf16_train_fp16_infer": (["+precision=bf16_train_fp16_infer"], all_in("bfloat16", rollout="float16")),
    "a later key wins over the overlay": (
        [FP16, f"{ROLLOUT}.dtype=bfloat16"],
        all_in("float16", rollout="bfloat16"),
    ),
    "ref and critic follow the actor": ([f"{ACTOR}.dtype=fp16"], all_in("float16", rollout="bfloat16")),
    "ref and critic follow upstream's key too": (
        [f"{ACTOR}.fsdp_config.dtype=float16"],
        all_in("float16", rollout="bfloat16"),
    ),
    "ref and critic with keys of their own": (
        [f"{ACTOR}.dtype=float16", f"{REF}.dtype=bfloat16", "critic.dtype=float32"],
        {"actor": "float16", "ref": "bfloat16", "critic": "float32", "rollout": "bfloat16"},
    ),
    "param_dtype wins where it is set": ([f"{MIXED}=fp16"], all_in("bfloat16", actor="float16")),
    "ref and critic follow under Megatron": (
        [f"{ACTOR}.dtype=fp16", MEGATRON],
        all_in("float16", rollout="bfloat16"),
    ),
    "a role's key wins over its engine's default": (
        [
            f"{ACTOR}.dtype=float16",
            f"{ACTOR}.fsdp_config.dtype=bfloat16",
            "critic.dtype=fp32",
            "critic.fsdp.dtype=bf16",
        ],
        all_in("float16", critic="float32", rollout="bfloat16"),
    ),
    "ref and critic follow upstream's key under Megatron": (
        [f"{ACTOR}.megatron.dtype=float16", MEGATRON],
        all_in("float16", rollout="bfloat16"),
    ),
    "a setting of the scaler": ([f"{ACTOR}.fsdp_config.grad_scaler.growth_interval=7"], all_in("bfloat16")),
    "kept modules": ([f"{KEEP}=[lm_head]"], all_in("bfloat16")),
    "a rollout's dtype": ([f"{ROLLOUT}.dtype=half"], all_in("bfloat16", rollout="half")),
    "a measured mismatch": (["trainer.mismatch_freq=1"], all_in("bfloat16")),
    "guards without a request": (["trainer.check_rewards=true", "trainer.check_weight_sync=true"], all_in("bfloat16")),
    "what upstream ignores or refuses itself": (
        [
            f"{ACTOR}.fsdp_config.model_dtype=int8",
            f"{MIXED}=fp8",
            "critic.fsdp.model_dtype=bf16",
            f"{ROLLOUT}.dtype=fp8",
        ],
        all_in("bfloat16", rollout="fp8"),
    ),
    "half precision masters of a ref": ([FP16, f"{REF}.fsdp_config.model_dtype=fp16"], all_in("float16")),
}
REFUSED = {
    "unknown dtype": ([f"{ACTOR}.dtype=banana"], ["dtype=banana", "float16 (fp16), bfloat16 (bf16) or float32 (fp32)"]),
    "unknown rollout dtype": (
        [FP16, f"{ROLLOUT}.dtype=fp16"],
        ["dtype=fp16 is unknown to the rollout", "float16", "actor_rollout_ref.rollout"],
    ),
    "misspelt overlay": (["+precision=fp61"], ["precision/fp61", "bf16_train_fp16_infer"]),
    "contradicting keys": (
        [f"{ACTOR}.dtype=bfloat16", f"{ACTOR}.fsdp_config.dtype=float16"],
        ["dtype=bfloat16 and fsdp_config.dtype=float16 contradict"],
    ),
    "contradicting critic keys": (
        ["critic.dtype=bfloat16", "critic.fsdp.dtype=float16"],
        ["dtype=bfloat16 and fsdp.dtype=float16 contradict"],
    ),
    "contradicting param_dtype and overlay": (
        ["+precision=bf16", f"{MIXED}=fp16"],
        ["dtype=bfloat16 and fsdp_config.mixed_precision.param_dtype=fp16 contradict"],
    ),
    "half precision masters of a critic beside the actor's adapters": (
        [FP16, "critic.fsdp.model_dtype=fp16", "actor_rollout_ref.model.lora_rank=8"],
        ["critic: model_dtype=fp16", "model_dtype=fp32"],
    ),
    "torchtitan": ([FP16, "model_engine=torchtitan"], ["dtype=float16", "strategy=torchtitan"]),
    **{
        f"contradicting Megatron keys of {role}": (
            [f"{role}.dtype=bfloat16", f"{role}.megatron.dtype=float16", MEGATRON],
            ["dtype=bfloat16 and megatron.dtype=float16 contradict"],
        )
        for role in (ACTOR, "critic")
    },
    **{
        f"{engine} of {role} by {key}": (
            [f"++{role}.{key}=float16", f"model_engine={engine}"],
            [f"dtype=float16 is not what strategy={engine} trains in"],
        )
        for engine in ("torchtitan", "veomni")
        for role in (ACTOR, "critic")
        for key in ("dtype", f"{engine}.dtype")
    },
    "a scale that is no number": ([f"{SCALER}.init_scale=high"], ["grad_scaler.init_scale=high", "number"]),
    "Megatron's growth": (
        [f"{ACTOR}.megatron.grad_scaler.growth_factor=4", MEGATRON],
        ["grad_scaler.growth_factor=4", "Megatron's loss scaler supports only 2.0"],
    ),
    "misspelt scaler key": ([f"+{SCALER}.grow=2"], ["grow"]),
    "kept modules as one word": ([f"{KEEP}=lm_head"], ["keep_fp32_modules=lm_head", "list"]),
    "unknown dtype of the ref": ([f"{REF}.fsdp_config.dtype=banana"], ["dtype=banana"]),
}
SETTINGS = {
    engine: [
        f"{ACTOR}.{engine}.grad_scaler.init_scale=1024",
        f"{ACTOR}.{engine}.grad_scaler.growth_interval=7",
        f"critic.{critic}.grad_scaler.min_scale=2",
        f"critic.{critic}.grad_scaler.max_consecutive_skips=3",
        MEGATRON if engine == "megatron" else f"{KEEP}=[lm_head]",
    ]
    for engine, critic in (("fsdp_config", "fsdp"), ("megatron", "megatron"))
}
DEFAULTS = {"init_scale": 65536, "growth_factor": 2, "backoff_factor": 0.5, "growth_interval": 400}
DEFAULTS |= {"min_scale": 1, "max_consecutive_skips": 32}
REQUESTS = {name: overrides for name, (overrides, _) in (RESOLVED | REFUSED).items()} | SETTINGS


@pytest.fixture(scope="module")
def composed(fork_server, environment, tiny_model, request, tmp_path_factory) -> dict[str, dict]:
    """The outcomes by name on the patched tree, for the session's tests of this file."""
    folder = tmp_path_factory.mktemp("config")
    items = [item for item in request.session.items if item.path == request.path and "composed" in item.fixturenames]
    names = {item.callspec.params["name"] for item in items}
    requests, results = folder / "requests.json", folder / "outcomes.json"
    requests.write_text(json.dumps({name: REQUESTS[name] for name in sorted(names)}))
    script = Path(__file__).with_name("config_cases.py")
    fork_server.check([script, tiny_model, requests, results], environment("patched"), folder, ranks=1)
    return json.loads(results.read_text())


@pytest.mark.parametrize("name", RESOLVED)
def test_overrides_resolve_to_dtypes(composed, name):
    assert {role: engine["dtype"] for role, engine in composed[name]["roles"].items()} == RESOLVED[name][1]


# The roles that request a precision and, where none does, whether another key of the run does.
REQUESTED = {
    **dict.fromkeys(RESOLVED, ({"actor", "ref", "critic"}, True)),
    "verl's default": (set(), False),
    "param_dtype wins where it is set": ({"actor"}, True),
    "a setting of the scaler": ({"actor"}, True),
    "kept modules": ({"actor", "ref"}, True),
    "a rollout's dtype": (set(), True),
    "a measured mismatch": (set(), True),
    "guards without a request": (set(), False),
    "what upstream ignores or refuses itself": (set(), False),
}


@pytest.mark.parametrize("name", REQUESTED)
def test_overrides_request_a_precision(composed, name):
    requested = {role for role, engine in composed[name]["roles"].items() if engine.get("requested")}
    assert (requested, composed[name]["run"]) == REQUESTED[name]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_reach_the_engine_configs(composed, name):
    roles = composed[name]["roles"]
    actor, critic = (roles[role]["grad_scaler"] for role in ("actor", "critic"))
    assert actor.items() >= (DEFAULTS | {"init_scale": 1024, "growth_interval": 7}).items()
    assert critic.items() >= (DEFAULTS | {"min_scale": 2, "max_consecutive_skips": 3}).items()
    if name == "fsdp_config":
        assert roles["actor"]["keep"] == roles["ref"]["keep"] == ["lm_head"]


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_overrides_are_refused_by_key_and_value(composed, name):
    """By the driver: upstream's ``validate_config`` builds actor and critic only, the workers rollout and ref."""
    for part in REFUSED[name][1]:
        assert part in composed[name]["error"]


# Engine configs that are not part of a role's config, as in a custom trainer.
ENGINES = """
from verl.workers.config import FSDPEngineConfig
print(FSDPEngineConfig(strategy="fsdp", dtype="fp16").dtype)
print(FSDPEngineConfig(strategy="fsdp", dtype="banana").dtype)
"""


def test_an_engines_own_config_checks_its_dtype(environment):
    line = [sys.executable, "-c", ENGINES]
    done = subprocess.run(line, env=environment("patched"), capture_output=True, text=True)
    assert done.stdout.strip().rpartition("\n")[2] == "float16"
    assert "ValueError: dtype=banana is" in done.stderr
