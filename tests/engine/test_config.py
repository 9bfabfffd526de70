"""Configuration keys: dtypes that they resolve to, defaults that follow other keys, and refusals.

The conformance suite records what upstream accepts silently.
"""

import json
from pathlib import Path

import pytest

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
MIXED = f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype"


def all_in(dtype: str, **others: str) -> dict[str, str]:
    return dict.fromkeys(("actor", "ref", "critic", "rollout"), dtype) | others


RESOLVED = {
    "verl's default": ([], all_in("bfloat16")),
    "+precision=fp16": (["+precision=fp16"], all_in("float16")),
    "+precision=bf16": (["+precision=bf16"], all_in("bfloat16")),
    "+precision=fp32": (["+precision=fp32"], all_in("float32")),
    "+precision=bf16_train_fp16_infer": (["+precision=bf16_train_fp16_infer"], all_in("bfloat16", rollout="float16")),
    "a later key wins over the overlay": (
        ["+precision=fp16", f"{ROLLOUT}.dtype=bfloat16"],
        all_in("float16", rollout="bfloat16"),
    ),
    "ref and critic follow the actor": ([f"{ACTOR}.dtype=float16"], all_in("float16", rollout="bfloat16")),
    "ref and critic follow upstream's key too": (
        [f"{ACTOR}.fsdp_config.dtype=float16"],
        all_in("float16", rollout="bfloat16"),
    ),
    "ref and critic with keys of their own": (
        [f"{ACTOR}.dtype=float16", f"{REF}.dtype=bfloat16", "critic.dtype=float32"],
        {"actor": "float16", "ref": "bfloat16", "critic": "float32", "rollout": "bfloat16"},
    ),
    "param_dtype wins where it is set": ([f"{MIXED}=fp16"], all_in("bfloat16", actor="float16")),
    "short names": ([f"{ACTOR}.dtype=fp16"], all_in("float16", rollout="bfloat16")),
    "fp16 under Megatron": (["+precision=fp16", "model_engine=megatron"], all_in("float16")),
    "ref and critic follow under Megatron": (
        [f"{ACTOR}.dtype=float16", "model_engine=megatron"],
        all_in("float16", rollout="bfloat16"),
    ),
    "half precision masters of a ref": (
        ["+precision=fp16", f"{REF}.fsdp_config.model_dtype=fp16"],
        all_in("float16"),
    ),
}

SCALER = f"{ACTOR}.fsdp_config.grad_scaler"
KEEP = f"{ACTOR}.fsdp_config.keep_fp32_modules"
REFUSED = {
    "unknown dtype": ([f"{ACTOR}.dtype=banana"], ["dtype=banana", "float16 (fp16), bfloat16 (bf16) or float32 (fp32)"]),
    "unknown rollout dtype": (
        [f"{ROLLOUT}.dtype=fp16"],
        ["dtype=fp16 is unknown to the rollout", "float16", "actor_rollout_ref.rollout"],
    ),
    "misspelt overlay": (["+precision=fp61"], ["precision/fp61", "bf16_train_fp16_infer"]),
    "fp16 masters": (
        ["+precision=fp16", f"{ACTOR}.fsdp_config.model_dtype=fp16"],
        ["model_dtype=fp16", "set model_dtype=fp32"],
    ),
    "contradicting keys": (
        [f"{ACTOR}.dtype=float16", f"{ACTOR}.fsdp_config.dtype=bfloat16"],
        ["dtype=float16 and fsdp_config.dtype=bfloat16 contradict"],
    ),
    "contradicting critic keys": (
        ["critic.dtype=float16", "critic.fsdp.dtype=bfloat16"],
        ["dtype=float16 and fsdp.dtype=bfloat16 contradict"],
    ),
    "contradicting param_dtype": (
        [f"{ACTOR}.dtype=float16", f"{MIXED}=bf16"],
        ["dtype=float16 and mixed_precision.param_dtype=bf16 contradict"],
    ),
    "contradicting param_dtype and overlay": (
        ["+precision=bf16", f"{MIXED}=fp16"],
        ["dtype=bfloat16 and fsdp_config.dtype=float16 contradict"],
    ),
    "torchtitan": (["+precision=fp16", "model_engine=torchtitan"], ["dtype=float16", "strategy=torchtitan"]),
    "veomni": (["+precision=fp16", "model_engine=veomni"], ["dtype=float16", "strategy=veomni"]),
    "fsdp_turbo": (["+precision=fp16", f"{ACTOR}.strategy=fsdp_turbo"], ["dtype=float16", "strategy=fsdp_turbo"]),
    "torchtitan in fp32": (["+precision=fp32", "model_engine=torchtitan"], ["dtype=float32", "strategy=torchtitan"]),
    "contradicting veomni keys": (
        [f"{ACTOR}.dtype=float16", f"{ACTOR}.veomni.dtype=bfloat16", "model_engine=veomni"],
        ["dtype=float16 and veomni.dtype=bfloat16 contradict"],
    ),
    "a scale that is no number": ([f"{SCALER}.init_scale=high"], ["grad_scaler.init_scale=high", "number"]),
    "min above init": ([f"{SCALER}.min_scale=1e6"], ["grad_scaler.min_scale=1000000.0", "init_scale=65536.0"]),
    "Megatron's growth": (
        [f"{ACTOR}.megatron.grad_scaler.growth_factor=4", "model_engine=megatron"],
        ["grad_scaler.growth_factor=4", "Megatron's loss scaler knows 2.0 alone"],
    ),
    "misspelt Megatron scaler key": ([f"+{ACTOR}.megatron.grad_scaler.grow=2", "model_engine=megatron"], ["grow"]),
    "kept modules as one word": ([f"{KEEP}=lm_head"], ["keep_fp32_modules=lm_head", "list"]),
    "kept modules that nothing reads": (
        [f"{KEEP}=[lm_head]", f"{ACTOR}.strategy=fsdp_turbo"],
        ["keep_fp32_modules=['lm_head'] is not read by strategy=fsdp_turbo"],
    ),
    "misspelt scaler key": ([f"+{SCALER}.grow=2"], ["grow"]),
}

SCALERS = {
    engine: [
        f"{ACTOR}.{engine}.grad_scaler.init_scale=1024",
        f"{ACTOR}.{engine}.grad_scaler.growth_interval=7",
        f"critic.{critic}.grad_scaler.min_scale=2",
        f"critic.{critic}.grad_scaler.max_consecutive_skips=3",
        *(["model_engine=megatron"] if engine == "megatron" else []),
    ]
    for engine, critic in (("fsdp_config", "fsdp"), ("megatron", "megatron"))
}
# Upstream's ``validate_config`` builds actor and critic only; the workers build rollout and ref.
INVALID_WORKERS = [f"{ROLLOUT}.dtype=fp61", f"{REF}.fsdp_config.dtype=banana"]
REQUESTS = {name: ("dtypes", overrides) for name, (overrides, _) in (RESOLVED | REFUSED).items()}
REQUESTS |= {name: ("scalers", overrides) for name, overrides in SCALERS.items()}
REQUESTS |= {override: ("validation", [override]) for override in INVALID_WORKERS}


@pytest.fixture(scope="module")
def composed(fork_server, environment, tiny_model, request, tmp_path_factory) -> dict[str, dict]:
    """The outcomes by name on the patched tree, for the session's tests of this file."""
    folder = tmp_path_factory.mktemp("config")
    names = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    requests, results = folder / "requests.json", folder / "outcomes.json"
    requests.write_text(json.dumps({name: REQUESTS[name] for name in sorted(names)}))
    script = Path(__file__).with_name("config_cases.py")
    fork_server.check([script, tiny_model, requests, results], environment("patched"), folder, ranks=1)
    return json.loads(results.read_text())


@pytest.mark.parametrize("name", RESOLVED)
def test_overrides_resolve_to_dtypes(composed, name):
    assert composed[name] == RESOLVED[name][1]


@pytest.mark.parametrize("name", SCALERS)
def test_scaler_settings_reach_the_engine_configs(composed, name):
    settings = composed[name]
    assert (settings["actor"]["init_scale"], settings["actor"]["growth_interval"]) == (1024, 7)
    assert (settings["critic"]["min_scale"], settings["critic"]["max_consecutive_skips"]) == (2, 3)
    assert settings["actor"]["min_scale"] == 1 and settings["critic"]["init_scale"] == 65536


@pytest.mark.parametrize("name", INVALID_WORKERS)
def test_driver_validates_rollout_and_ref_too(composed, name):
    assert name.partition(".dtype")[2] in composed[name]["error"]


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_overrides_are_refused_by_key_and_value(composed, name):
    for part in REFUSED[name][1]:
        assert part in composed[name]["error"]
