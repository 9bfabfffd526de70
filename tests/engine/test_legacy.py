"""Configs of the workers and SFT trainers of verl up to 0.7.1."""

import pytest
from omegaconf import DictConfig, OmegaConf
from precision import GradScalerConfig, Precision, check_sft, check_workers, sft_precision, worker_scaler


@pytest.mark.parametrize(
    "grad_scaler, init_scale",
    [
        (None, 65536.0),
        ({"init_scale": 4.0}, 4.0),
        ({"_target_": "verl.utils.precision.GradScalerConfig", "init_scale": 4.0}, 4.0),
        (GradScalerConfig(init_scale=4.0), 4.0),
    ],
)
def test_a_worker_that_trains_in_fp16_has_a_scaler(grad_scaler, init_scale):
    config = {"dtype": "float16", "grad_scaler": grad_scaler}

    def scaler(dtype, trained):
        return worker_scaler(config, Precision.of_worker({"dtype": dtype}, trained), "cpu")

    assert scaler("float16", trained=True).get_scale() == init_scale
    assert scaler("float16", trained=False) is None
    assert scaler("bfloat16", trained=True) is None


def ppo_config(*overrides: str) -> DictConfig:
    """Return the keys that verl up to 0.7.1 composes, as far as they affect dtypes."""
    follows = "${oc.select:actor_rollout_ref.actor.fsdp_config.dtype,null}"
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "actor": {
                    "strategy": "fsdp",
                    "dtype": None,
                    "fsdp_config": {"dtype": "${oc.select:..dtype,bfloat16}", "grad_scaler": {"init_scale": 1.0}},
                },
                "ref": {
                    "strategy": "${actor_rollout_ref.actor.strategy}",
                    "dtype": follows,
                    "fsdp_config": {"dtype": "${oc.select:..dtype,bfloat16}"},
                },
                "rollout": {"name": "vllm", "dtype": "bfloat16"},
            },
            "critic": {
                "strategy": "fsdp2",
                "dtype": follows,
                "model": {"fsdp_config": {"dtype": "${oc.select:...dtype,bfloat16}"}},
            },
            "reward_model": {"model": {"path": None}},  # without a strategy: not a worker of this release
            "trainer": {"use_legacy_worker_impl": "auto"},
        }
    )
    for override in overrides:
        key, value = override.split("=")
        OmegaConf.update(config, key, value)
    OmegaConf.set_struct(config, True)
    return config


ACTOR, ROLLOUT, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic.model.fsdp_config"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (f"{ACTOR}.dtype=float16", "actor_rollout_ref.rollout.dtype=float16"),
        (f"{ACTOR}.dtype=float16", "critic.dtype=float32", "actor_rollout_ref.ref.dtype=bf16"),
        (f"{ACTOR}.fsdp_config.dtype=float16",),
        ("trainer.use_legacy_worker_impl=disable", f"{ACTOR}.dtype=bfloat16"),
        (f"{ACTOR}.strategy=megatron",),
        (f"{ROLLOUT}.dtype=half",),
        (f"{ROLLOUT}.name=hf", f"{ROLLOUT}.dtype=float16", f"{ACTOR}.dtype=float16", f"{ACTOR}.strategy=fsdp2"),
        (f"{ROLLOUT}.name=hf", f"{ROLLOUT}.dtype=float16", f"{ACTOR}.strategy=fsdp"),
        ("critic.strategy=megatron", "critic.megatron.dtype=float16"),  # upstream's own
    ],
)
def test_supported_worker_configs_pass(overrides):
    check_workers(ppo_config(*overrides))


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([f"{ACTOR}.dtype=banana"], f"{ACTOR}.fsdp_config.dtype=banana is not a dtype to compute in: choose float16"),
        (["critic.dtype=banana"], f"{CRITIC}.dtype=banana is not a dtype to compute in: choose float16"),
        (
            [f"{ACTOR}.dtype=bfloat16", f"{ACTOR}.fsdp_config.dtype=float16"],
            f"{ACTOR}.dtype=bfloat16 and fsdp_config.dtype=float16 contradict each other",
        ),
        (
            ["critic.dtype=float16", f"{CRITIC}.dtype=bfloat16"],
            "critic.dtype=float16 and model.fsdp_config.dtype=bfloat16 contradict each other",
        ),
        (
            [f"{ACTOR}.dtype=float16", f"{ACTOR}.fsdp_config.model_dtype=fp16"],
            f"{ACTOR}.fsdp_config.model_dtype=fp16 with dtype=float16 makes the optimizer's weights half precision",
        ),
        ([f"{ACTOR}.fsdp_config.grad_scaler.init_scale=x"], f"{ACTOR}.fsdp_config.grad_scaler.init_scale=x must be a"),
        ([f"{ROLLOUT}.dtype=fp8"], f"{ROLLOUT}.dtype=fp8 is unknown to the rollout"),
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


@pytest.mark.parametrize(
    "config",
    [
        {"engine": FSDP_ENGINE | {"dtype": "float16"}},
        {"engine": FSDP_ENGINE | {"mixed_precision": {"param_dtype": "fp16"}}},
        {"engine": FSDP_ENGINE, "actor_rollout_ref": {"actor": {"dtype": "float16"}}},  # +precision=fp16
        {"engine": {"dtype": "bfloat16"}, "actor_rollout_ref": {"actor": {"dtype": "float16"}}},  # Megatron
    ],
)
def test_fp16_sft_on_a_model_engine_is_refused(config):
    for passes in (FSDP_ENGINE, {"dtype": "float16"}):  # the second is Megatron's, upstream's own
        check_sft(OmegaConf.create({"engine": passes}))
    with pytest.raises(ValueError, match="^engine.dtype=float16 is not what SFT on the model engine trains in"):
        check_sft(OmegaConf.create(config))


def test_sft_accepts_either_of_two_keys():
    def config(dtype, engine):
        return OmegaConf.create({"dtype": dtype, "model": {"fsdp_config": {"dtype": engine}}})

    for dtype, engine in ((None, "float16"), ("fp16", "float16")):
        assert sft_precision(config(dtype, engine)).loss_scaling
    with pytest.raises(ValueError, match="^dtype=float16 and model.fsdp_config.dtype=bfloat16 contradict each other"):
        sft_precision(config("float16", "bfloat16"))
