"""Configs of the workers and SFT trainers of verl up to 0.7.1."""

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from precision import (
    UNREQUESTED,
    GradScalerConfig,
    Precision,
    check_sft,
    check_workers,
    sft_precision,
    worker_scaler,
)


@pytest.mark.parametrize(
    "settings", [{"_target_": "verl.utils.precision.GradScalerConfig", "init_scale": 4}, GradScalerConfig(init_scale=4)]
)
def test_a_worker_that_trains_in_fp16_has_a_scaler(settings):
    def scaler(dtype, trained=True, settings=settings):
        engine = {"grad_scaler": settings}
        return worker_scaler(engine, Precision.of_worker(dtype, engine, trained), "cpu")

    assert scaler("float16").get_scale() == 4.0
    assert scaler("float16", settings=None).get_scale() == 65536.0
    assert scaler("float16", trained=False) is scaler("bfloat16") is scaler(None, settings=None) is None


ACTOR, ROLLOUT, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic.model.fsdp_config"


def ppo_config(*overrides: str) -> DictConfig:
    """Return the keys that verl up to 0.7.1 composes, as far as they affect dtypes."""
    follows = f"${{oc.select:{ACTOR}.dtype,null}}"
    engine = {"dtype": f"${{oc.select:{ACTOR}.fsdp_config.dtype,bfloat16}}"}
    scaler = {"grad_scaler": {"init_scale": 65536.0}}
    roles = {
        "actor": {"strategy": "fsdp", "dtype": None, "fsdp_config": {"dtype": "bfloat16"} | scaler},
        "ref": {"strategy": "${actor_rollout_ref.actor.strategy}", "dtype": follows, "fsdp_config": engine},
        "rollout": {"name": "vllm", "dtype": "bfloat16"},
    }
    config = OmegaConf.create(
        {
            "actor_rollout_ref": roles,
            "critic": {"strategy": "fsdp2", "dtype": follows, "model": {"fsdp_config": engine}},
            "reward_model": {"model": {"path": None}},  # without a strategy: not a worker of this release
            "trainer": {"use_legacy_worker_impl": "auto", "mismatch_freq": -1},
        }
    )
    for override in overrides:
        key, value = override.split("=")
        OmegaConf.update(config, key, yaml.safe_load(value))
    OmegaConf.set_struct(config, True)
    return config


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (f"{ACTOR}.dtype=float16", "critic.dtype=float32", "actor_rollout_ref.ref.dtype=bf16", f"{ROLLOUT}.dtype=half"),
        (f"{ACTOR}.fsdp_config.dtype=float16",),
        # The engines' default is not told from the same value typed.
        ("critic.dtype=float16", f"{CRITIC}.dtype=bfloat16"),
        ("trainer.use_legacy_worker_impl=disable", f"{ACTOR}.dtype=bfloat16"),
        (f"{ROLLOUT}.name=hf", f"{ROLLOUT}.dtype=float16", f"{ACTOR}.dtype=float16", f"{ACTOR}.strategy=fsdp2"),
        (f"{ROLLOUT}.name=hf", f"{ROLLOUT}.dtype=float16", f"{ACTOR}.strategy=fsdp"),
        ("critic.strategy=megatron", "critic.megatron.dtype=float16"),  # upstream's own
        ("critic.dtype=float16", f"{CRITIC}.model_dtype=fp16", "critic.model.lora_adapter_path=adapter"),
    ],
)
def test_supported_worker_configs_pass(overrides):
    check_workers(ppo_config(*overrides))


UNCHECKED = f"{ACTOR}.fsdp_config.model_dtype=int8"  # upstream's own to refuse


def test_a_config_that_requests_nothing_is_not_checked():
    check_workers(ppo_config(UNCHECKED, f"{ROLLOUT}.dtype=fp8"))
    check_workers(ppo_config(UNCHECKED, f"{ROLLOUT}.dtype=auto", f"{ACTOR}.fsdp_config.grad_scaler.init_scale=65536"))


@pytest.mark.parametrize(
    ("requested", "checked"),
    [
        (f"{ACTOR}.dtype=bfloat16", True),
        (f"{ACTOR}.fsdp_config.grad_scaler.init_scale=4.0", True),
        ("critic.dtype=bfloat16", False),
        (f"{CRITIC}.dtype=float16", False),
        (f"{ROLLOUT}.dtype=half", False),
        ("trainer.mismatch_freq=1", False),
    ],
)
def test_a_role_is_checked_where_it_requests_a_precision(requested, checked):
    config = ppo_config(UNCHECKED, requested)
    if checked:
        with pytest.raises(ValueError, match=f"^{UNCHECKED} is not a dtype to compute in"):
            check_workers(config)
    else:
        check_workers(config)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([f"{ACTOR}.dtype=banana"], f"{ACTOR}.dtype=banana is not a dtype to compute in: choose float16"),
        (
            [f"{ACTOR}.fsdp_config.dtype=banana"],
            f"{ACTOR}.fsdp_config.dtype=banana is not a dtype to compute in: choose float16",
        ),
        (
            ["critic.dtype=bfloat16", f"{CRITIC}.dtype=float16"],
            "critic.dtype=bfloat16 and model.fsdp_config.dtype=float16 contradict each other",
        ),
        (
            [f"{ACTOR}.dtype=bfloat16", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp32"],
            f"{ACTOR}.dtype=bfloat16 and fsdp_config.mixed_precision.param_dtype=fp32 contradict each other",
        ),
        (
            ["critic.dtype=float16", f"{CRITIC}.model_dtype=fp16", "actor_rollout_ref.model.lora_adapter_path=adapter"],
            f"{CRITIC}.model_dtype=fp16 with dtype=float16 makes the optimizer's weights half precision",
        ),
        ([f"{ACTOR}.fsdp_config.grad_scaler.init_scale=x"], f"{ACTOR}.fsdp_config.grad_scaler.init_scale=x must be a"),
        (
            ["critic.dtype=bf16", f"{CRITIC}.grad_scaler.init_scale=x"],
            f"{CRITIC}.grad_scaler.init_scale=x must be a",
        ),
        ([f"{ROLLOUT}.dtype=fp8", "critic.dtype=bf16"], f"{ROLLOUT}.dtype=fp8 is unknown to the rollout"),
        ([f"{ROLLOUT}.name=hf", f"{ROLLOUT}.dtype=half"], f"{ROLLOUT}.dtype=half is not a dtype to compute in"),
        (
            ["trainer.use_legacy_worker_impl=disable", "critic.dtype=float16"],
            "critic.dtype=float16 is not what trainer.use_legacy_worker_impl=disable trains in on this release",
        ),
        (
            [f"{ACTOR}.strategy=megatron", f"{ACTOR}.dtype=float16"],
            f"{ACTOR}.dtype=float16 does not reach strategy=megatron on this release",
        ),
        (
            [f"{ROLLOUT}.name=hf", f"{ROLLOUT}.dtype=float16", f"{ACTOR}.strategy=fsdp2"],
            f"{ROLLOUT}.dtype=float16 with name=hf, whose weights FSDP2 rounds to the actor's bfloat16 before: set",
        ),
    ],
)
def test_unsupported_worker_configs_are_refused_in_one_line(overrides, message):
    with pytest.raises(ValueError) as error:
        check_workers(ppo_config(*overrides))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


FSDP_ENGINE = {"strategy": "fsdp", "dtype": "bfloat16"}
OVERLAY = {"actor_rollout_ref": {"actor": {"dtype": "float16"}}}  # +precision=fp16


@pytest.mark.parametrize(
    "config",
    [
        {"engine": FSDP_ENGINE | {"mixed_precision": {"param_dtype": "fp16"}}},
        {"engine": {"strategy": "fsdp2", "dtype": "float16"}},
        {"engine": FSDP_ENGINE} | OVERLAY,
        {"engine": {"dtype": "bfloat16"}} | OVERLAY,  # Megatron
    ],
)
def test_fp16_sft_on_a_model_engine_is_refused(config):
    for passes in (FSDP_ENGINE, {"dtype": "float16"}):  # the second is Megatron's, upstream's own
        check_sft(OmegaConf.create({"engine": passes}))
    with pytest.raises(ValueError, match="^engine.dtype=float16 is not what SFT on the model engine trains in"):
        check_sft(OmegaConf.create(config))


def test_sft_accepts_either_of_two_keys_and_adapters_over_a_base_in_fp16():
    def precision(dtype, engine, **model):
        return sft_precision(OmegaConf.create({"dtype": dtype, "model": {"fsdp_config": {"dtype": engine}} | model}))

    assert precision(None, "float16").loss_scaling and precision("fp16", "float16").loss_scaling
    adapted = precision(None, None, fsdp_config={"dtype": "float16", "model_dtype": "float16"}, lora_rank=8)
    assert (adapted.base, adapted.master) == (torch.float16, torch.float32)
    assert precision("float16", "bfloat16").loss_scaling, "upstream's default, or the same value typed"
    assert precision(None, "bfloat16") is UNREQUESTED and precision("bfloat16", "bfloat16").requested
    with pytest.raises(ValueError, match="^dtype=bfloat16 and model.fsdp_config.dtype=float16 contradict each other"):
        precision("bfloat16", "float16")
    with pytest.raises(ValueError, match="^dtype=bf16 and model.fsdp_config.mixed_precision.param_dtype=fp32 contra"):
        precision("bf16", None, fsdp_config={"mixed_precision": {"param_dtype": "fp32"}})
