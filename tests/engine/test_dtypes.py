"""Dtypes are resolved once, where a key requests a precision, and invalid ones are refused."""

import copy
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from precision import (
    UNREQUESTED,
    GradScalerConfig,
    Precision,
    apply_engine_dtype,
    apply_role_dtype,
    check_rollout_dtype,
    requests_precision,
    rollout_precision,
    run_requests_precision,
    to_dtype,
)


@dataclass
class Engine:
    """The keys of verl's engine configs by which a precision is requested, with verl's defaults."""

    dtype: str | None = "bfloat16"
    precision_requested: bool = False
    mixed_precision: dict | None = None
    grad_scaler: GradScalerConfig = field(default_factory=GradScalerConfig)
    keep_fp32_modules: list[str] = field(default_factory=list)


# Values of one key of an engine's config, and whether they request a precision.
ENGINE = [
    *(({"dtype": dtype}, False) for dtype in (None, "bfloat16", "bf16", torch.bfloat16)),
    *(({"dtype": dtype}, True) for dtype in ("float16", "fp16", 16, "float32", "32", torch.float16, "banana")),
    *(({"mixed_precision": mixed}, False) for mixed in (None, {}, {"param_dtype": None}, {"reduce_dtype": "fp16"})),
    *(({"mixed_precision": {"param_dtype": dtype}}, False) for dtype in ("bf16", "fp32", "banana")),
    *(({"mixed_precision": {"param_dtype": dtype}}, True) for dtype in ("fp16", "float16")),
    ({"mixed_precision": False}, False),  # veomni's flag
    ({"grad_scaler": {"_target_": "verl.utils.precision.GradScalerConfig", "init_scale": 65536}}, False),
    ({"grad_scaler": {"init_scale": 1024.0}}, True),
    *(({"grad_scaler": {key: 7}}, True) for key in ("growth_factor", "growth_interval", "max_consecutive_skips")),
    ({"grad_scaler": {"backoff_factor": 0.25}}, True),
    ({"grad_scaler": {"min_scale": 2.0}}, True),
    ({"keep_fp32_modules": []}, False),
    ({"keep_fp32_modules": ["lm_head"]}, True),
    ({"precision_requested": True}, True),
    ({"model_dtype": "fp16"}, False),
    ({"report_dtypes": True}, False),
]


@pytest.mark.parametrize(("keys", "requested"), ENGINE, ids=str)
def test_a_key_of_an_engine_requests_a_precision(keys, requested):
    assert requests_precision(keys) is requests_precision(OmegaConf.create(plain(keys))) is requested
    assert requests_precision(SimpleNamespace(**keys)) is requested
    if keys.keys() <= vars(Engine()).keys():
        settings = {"grad_scaler": GradScalerConfig.read(keys["grad_scaler"])} if "grad_scaler" in keys else {}
        assert requests_precision(Engine(**keys | settings)) is requested


def plain(keys: dict[str, Any]) -> dict[str, Any]:
    """Return keys that OmegaConf can hold: torch's dtypes by name."""
    return {key: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for key, v in keys.items()}


def test_a_config_without_a_key_requests_nothing():
    assert not any(map(requests_precision, ({}, OmegaConf.create({}), SimpleNamespace(), Engine())))
    with pytest.raises(ValueError, match="grad_scaler.init_scale=high must be a number"):
        requests_precision({"grad_scaler": {"init_scale": "high"}})


# As verl's yaml files compose them, as far as they affect dtypes.
FSDP = {"dtype": "bfloat16", "mixed_precision": None, "grad_scaler": {}, "keep_fp32_modules": []}
RUN = {
    "trainer": {"mismatch_freq": -1},
    "actor_rollout_ref": {
        "actor": {"strategy": "fsdp2", "dtype": None, "fsdp_config": FSDP},
        "ref": {"strategy": "fsdp2", "dtype": None, "fsdp_config": FSDP},
        "rollout": {"name": "vllm", "dtype": "bfloat16"},
    },
    "critic": {"strategy": "fsdp2", "dtype": None, "fsdp": FSDP, "model": {"fsdp_config": FSDP}},
    "reward_model": {"strategy": "fsdp2", "dtype": None, "model": {"fsdp_config": FSDP}},
}
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))


@pytest.mark.parametrize(
    ("changes", "requested"),
    [
        ({}, False),
        *(({f"{role}.dtype": "bfloat16"}, True) for role in (ACTOR, REF, "critic", "reward_model")),
        *(
            ({f"{key}.fsdp_config.dtype": "float32"}, True)
            for key in (ACTOR, REF, "critic.model", "reward_model.model")
        ),
        ({"critic.fsdp.dtype": "fp16"}, True),
        ({f"{ACTOR}.fsdp_config.dtype": "bf16"}, False),
        ({f"{ACTOR}.fsdp_config.mixed_precision": {"param_dtype": "fp16"}}, True),
        ({f"{REF}.fsdp_config.grad_scaler.growth_interval": 7}, True),
        ({"critic.fsdp.keep_fp32_modules": ["score"]}, True),
        *(
            ({f"{role}.strategy": engine, f"{role}.{engine}": {"dtype": dtype}}, dtype == "float16")
            for role in (ACTOR, "critic")
            for engine in ("megatron", "veomni", "torchtitan")
            for dtype in ("float16", "bfloat16")
        ),
        ({f"{ACTOR}.megatron": {"dtype": "float16"}}, False),  # another strategy's
        *(({f"{ROLLOUT}.dtype": dtype}, False) for dtype in ("auto", "fp8", "banana")),  # the last two upstream refuses
        *(({f"{ROLLOUT}.dtype": dtype}, True) for dtype in ("float16", "half", "float32", "float")),
        *(({"trainer.mismatch_freq": freq}, True) for freq in (1, 4)),
        *(({"trainer.mismatch_freq": freq}, False) for freq in (None, 0, -1)),
        ({"trainer.check_weight_sync": True, "trainer.check_rewards": True, f"{ROLLOUT}.report_dtypes": True}, False),
    ],
    ids=str,
)
def test_a_key_of_a_run_requests_a_precision(changes, requested):
    config = OmegaConf.create(copy.deepcopy(RUN))
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    assert run_requests_precision(config) is run_requests_precision(OmegaConf.to_container(config)) is requested


@pytest.mark.parametrize(
    "missing", ["trainer.mismatch_freq", "critic", "reward_model", REF, f"{ACTOR}.strategy", f"{ROLLOUT}.dtype"]
)
def test_a_run_of_a_release_without_a_key_requests_nothing(missing):
    config, (*parents, last) = copy.deepcopy(RUN), missing.split(".")
    node = config
    for key in parents:
        node = node[key]
    del node[last]
    assert run_requests_precision(config) is False


def engine_config(**overrides) -> SimpleNamespace:
    return SimpleNamespace(
        **{"dtype": None, "mixed_precision": None, "model_dtype": "fp32", "forward_only": False, "strategy": "fsdp"}
        | overrides
    )


def facts(precision: Precision) -> tuple[str, str, str, bool]:
    names = precision.names()
    return names["compute"], names["reduce"], names["master"], names["loss_scaling"]


BF16_MASTERS = ("bfloat16", "float32", "bfloat16", False)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"precision_requested": True}, ("bfloat16", "float32", "float32", False)),
        ({"dtype": "bfloat16", "precision_requested": True, "model_dtype": "bf16"}, BF16_MASTERS),
        ({"dtype": "float16"}, ("float16", "float32", "float32", True)),
        ({"dtype": "float16", "forward_only": True}, ("float16", "float32", "float32", False)),
        ({"dtype": "float16", "forward_only": True, "model_dtype": None}, ("float16", "float32", "float16", False)),
        ({"dtype": "fp16", "model_dtype": 32}, ("float16", "float32", "float32", True)),
        ({"dtype": "fp32", "model_dtype": None}, ("float32", "float32", "float32", False)),
        ({"mixed_precision": {"param_dtype": "fp16"}}, ("float16", "float32", "float32", True)),
        ({"dtype": "float16", "mixed_precision": {"reduce_dtype": "bf16"}}, ("float16", "bfloat16", "float32", True)),
    ],
)
def test_dtypes_and_loss_scaling_are_resolved(config, expected):
    precision = Precision.resolve(engine_config(**config))
    assert facts(precision) == expected and precision.requested and precision.reported
    assert precision.export_dtype is precision.compute


# What upstream accepts and ignores, or refuses itself, stays so.
IGNORED = {"model_dtype": "int8", "mixed_precision": {"param_dtype": "fp8"}, "strategy": "fsdp_turbo", "dtype": None}


@pytest.mark.parametrize("config", [{}, {"dtype": "bfloat16"}, {"model_dtype": "bf16"}, IGNORED], ids=str)
def test_a_config_that_requests_nothing_is_left_to_upstream(config):
    engine = engine_config(**config)
    assert Precision.resolve(engine, lora=False) is UNREQUESTED
    apply_role_dtype(None, "fsdp_config", engine)
    assert engine == engine_config(**config)
    assert not (UNREQUESTED.requested or UNREQUESTED.reported or UNREQUESTED.loss_scaling)
    assert UNREQUESTED.export_dtype is None


def test_reports_are_turned_off_by_their_key():
    for value, reported in ((True, True), (None, True), (False, False)):
        assert Precision.resolve(engine_config(dtype="float16", report_dtypes=value)).reported is reported
        assert Precision.of_worker("bfloat16", {"report_dtypes": value}, trained=True).reported is reported
    assert not {"requested", "reported"} & Precision.resolve(engine_config(dtype="float16")).names().keys()


@pytest.mark.parametrize("role", ["float16", "bf16", "fp32"])
@pytest.mark.parametrize("param_dtype", ["fp16", "bfloat16", "float32"])
def test_a_roles_dtype_and_the_engines_param_dtype_must_agree(role, param_dtype):
    engine = {"mixed_precision": {"param_dtype": param_dtype}}
    if to_dtype(role, "dtype") == to_dtype(param_dtype, "dtype"):
        apply_role_dtype(role, "fsdp", engine_config(**engine))
        return
    message = f"^dtype={role} and fsdp.mixed_precision.param_dtype={param_dtype} contradict each other: remove fsdp."
    with pytest.raises(ValueError, match=message):
        apply_role_dtype(role, "fsdp", engine_config(**engine))
    with pytest.raises(ValueError, match=message):
        Precision.of_worker(role, engine, trained=True, engine_key="fsdp")


def test_buffers_are_fp32_unless_their_dtype_is_set():
    for mixed, expected in (
        ({}, "float32"),
        ({"buffer_dtype": "bf16"}, "bfloat16"),
        ({"buffer_dtype": None}, "float32"),
    ):
        assert Precision.resolve(engine_config(dtype="fp16", mixed_precision=mixed)).names()["buffer"] == expected


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"dtype": "banana"}, "dtype=banana is not a dtype to compute in: choose float16"),
        ({"precision_requested": True, "mixed_precision": {"param_dtype": "fp8"}}, "mixed_precision.param_dtype=fp8"),
        ({"dtype": "fp16", "mixed_precision": {"reduce_dtype": "half"}}, "mixed_precision.reduce_dtype=half"),
        ({"dtype": "fp16", "model_dtype": "int8"}, "model_dtype=int8"),
        ({"dtype": "float16", "model_dtype": "bf16"}, "model_dtype=bf16 with dtype=float16"),
        ({"dtype": "float32", "mixed_precision": {"param_dtype": "fp16"}}, "contradict"),
        ({"dtype": "float16", "strategy": "fsdp_turbo"}, "strategy=fsdp_turbo"),
        ({"keep_fp32_modules": "lm_head"}, "keep_fp32_modules=lm_head must be a list"),
        ({"keep_fp32_modules": ["lm_head"], "strategy": "fsdp_turbo"}, "is not read by strategy=fsdp_turbo"),
    ],
)
def test_unknown_and_contradicting_dtypes_are_refused_in_one_line(config, named):
    with pytest.raises(ValueError) as refusal:
        Precision.resolve(engine_config(**config), lora=False)
    assert named in str(refusal.value) and "\n" not in str(refusal.value)


def test_model_dtype_is_the_frozen_bases_with_lora():
    for dtype in ("float16", "bfloat16"):
        engine = engine_config(dtype=dtype, model_dtype=dtype, precision_requested=True)
        precision = Precision.resolve(engine, lora=True)
        assert (precision.names()["base"], precision.names()["master"]) == (dtype, "float32")
        assert Precision.resolve(engine).compute == precision.compute
    with pytest.raises(ValueError, match="model_dtype=fp16 with dtype=float16.*lora_rank"):
        Precision.of_worker("float16", {"model_dtype": "fp16"}, trained=True, lora=False)


@pytest.mark.parametrize("strategy", ["torchtitan", "veomni", "automodel", "fsdp_turbo"])
def test_engines_without_a_loss_scaler_refuse_other_dtypes(strategy):
    for dtype in (None, "bfloat16"):
        engine = engine_config(strategy=strategy)
        apply_role_dtype(dtype, strategy, engine)
        assert engine.dtype == dtype
    for dtype in ("float16", "float32"):
        refusal = pytest.raises(ValueError, match=f"dtype={dtype} is not what strategy={strategy} trains in")
        with refusal:
            apply_role_dtype(dtype, strategy, engine_config(strategy=strategy))
        with refusal:
            apply_engine_dtype(engine_config(strategy=strategy, dtype=dtype))


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
@pytest.mark.parametrize(
    ("role", "engine", "expected"),
    [
        ("fp16", "bfloat16", "float16"),  # upstream's default, or the same value typed
        ("fp16", "float16", "float16"),
        ("float32", None, "float32"),
        ("bf16", "bfloat16", "bfloat16"),
        (None, "fp16", "float16"),
        ("bfloat16", "float16", "contradict each other: remove fsdp_config.dtype"),
        ("float16", "float32", "contradict each other: remove fsdp_config.dtype"),
        ("float16", "banana", "fsdp_config.dtype=banana is not a dtype"),
        ("banana", "bfloat16", "dtype=banana is not a dtype"),
    ],
)
def test_a_roles_dtype_becomes_its_engines(strategy, role, engine, expected):
    config = engine_config(strategy=strategy, dtype=engine)
    if (strategy, expected) == ("megatron", "float32"):
        expected = "dtype=float32 is not supported by strategy=megatron: choose bfloat16 or float16"
    if " " in expected:
        with pytest.raises(ValueError, match=expected):
            apply_role_dtype(role, "fsdp_config", config)
        return
    apply_role_dtype(role, "fsdp_config", config)
    assert config.dtype == expected and requests_precision(config)
    assert getattr(config, "precision_requested", False) == (role is not None)
    worker = Precision.of_worker(role, {"dtype": engine}, trained=True)
    assert worker.names()["compute"] == expected and worker.requested


def test_a_rollouts_dtype_requests_a_precision():
    """Where the workers of verl up to 0.7.1 sample by themselves."""
    assert rollout_precision("bfloat16") is rollout_precision("auto") is rollout_precision("fp8") is UNREQUESTED
    assert rollout_precision("float16").compute == torch.float16 and rollout_precision("float32").requested
    for dtype in ("auto", "half", "float16", "bfloat16", "float", "float32"):
        check_rollout_dtype(dtype)
    with pytest.raises(ValueError, match="dtype=fp16 is unknown to the rollout"):
        check_rollout_dtype("fp16")


@pytest.mark.parametrize(
    "dtype, fsdp_config, trained, expected",
    [
        (None, {}, True, None),
        (None, {"dtype": "bfloat16", "model_dtype": "bf16", "grad_scaler": {}}, True, None),
        ("bfloat16", {}, True, ("bfloat16", "float32", "float32", False)),
        ("bfloat16", {}, False, ("bfloat16", "float32", "bfloat16", False)),
        ("bf16", {"dtype": None, "model_dtype": "fp32"}, False, ("bfloat16", "float32", "float32", False)),
        (None, {"dtype": "float16"}, True, ("float16", "float32", "float32", True)),
        ("float16", {"dtype": "bfloat16"}, True, ("float16", "float32", "float32", True)),
        (None, {"mixed_precision": {"param_dtype": "fp16"}}, False, ("float16", "float32", "float16", False)),
        (None, {"grad_scaler": {"min_scale": 2.0}}, True, ("bfloat16", "float32", "float32", False)),
    ],
)
def test_missing_keys_of_a_worker_have_verls_defaults(dtype, fsdp_config, trained, expected):
    for config in (fsdp_config, OmegaConf.create(fsdp_config)):
        precision = Precision.of_worker(dtype, config, trained)
        assert precision is UNREQUESTED if expected is None else facts(precision) == expected


def test_autocast_is_disabled_in_fp32():
    product = torch.ones(2, 2).matmul
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        with warnings.catch_warnings(action="error"):  # torch warns of a dtype that it cannot cast to
            with Precision.of_worker(dtype, {}, trained=True).autocast("cpu"):
                assert product(torch.ones(2, 2)).dtype == dtype


@pytest.mark.parametrize("strategy", ["fsdp", "megatron", "veomni"])
def test_an_engines_spelling_stays_without_a_request(strategy):
    engine = engine_config(strategy=strategy, dtype="bf16")
    apply_engine_dtype(engine)
    assert engine.dtype == "bf16"
