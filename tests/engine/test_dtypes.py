"""Dtypes are resolved once, and invalid ones are refused."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from precision import Precision, check_engine_dtype


def engine_config(**overrides) -> SimpleNamespace:
    return SimpleNamespace(
        **{"dtype": None, "mixed_precision": None, "model_dtype": "fp32", "forward_only": False, "strategy": "fsdp"}
        | overrides
    )


def facts(precision: Precision) -> tuple[str, str, str, bool]:
    names = precision.names()
    return names["compute"], names["reduce"], names["master"], names["loss_scaling"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ("bfloat16", "float32", "float32", False)),
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
    assert facts(Precision.resolve(engine_config(**config))) == expected


def test_buffers_are_fp32_unless_their_dtype_is_set():
    for mixed, expected in (
        ({}, "float32"),
        ({"buffer_dtype": "bf16"}, "bfloat16"),
        ({"buffer_dtype": None}, "float32"),
    ):
        assert Precision.resolve(engine_config(mixed_precision=mixed)).names()["buffer"] == expected


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"mixed_precision": {"param_dtype": "fp8"}}, "mixed_precision.param_dtype=fp8"),
        ({"mixed_precision": {"reduce_dtype": "half"}}, "mixed_precision.reduce_dtype=half"),
        ({"model_dtype": "int8"}, "model_dtype=int8"),
        ({"dtype": "float16", "model_dtype": "bf16"}, "model_dtype=bf16 with dtype=float16"),
        ({"dtype": "float32", "mixed_precision": {"param_dtype": "fp16"}}, "contradict"),
        ({"dtype": "float16", "strategy": "fsdp_turbo"}, "strategy=fsdp_turbo"),
    ],
)
def test_unknown_and_contradicting_dtypes_are_refused_in_one_line(config, named):
    with pytest.raises(ValueError) as refusal:
        Precision.resolve(engine_config(**config), lora=False)
    assert named in str(refusal.value) and "\n" not in str(refusal.value)


def test_model_dtype_is_the_frozen_bases_with_lora():
    for dtype in ("float16", "bfloat16"):
        precision = Precision.resolve(engine_config(dtype=dtype, model_dtype=dtype), lora=True)
        assert (precision.names()["base"], precision.names()["master"]) == (dtype, "float32")
        assert Precision.resolve(engine_config(dtype=dtype, model_dtype=dtype)).compute == precision.compute
    with pytest.raises(ValueError, match="model_dtype=fp16 with dtype=float16.*lora_rank"):
        Precision.of_worker({"dtype": "float16", "model_dtype": "fp16"}, trained=True, lora=False)


@pytest.mark.parametrize("strategy", ["torchtitan", "veomni", "automodel", "fsdp_turbo"])
def test_engines_without_a_loss_scaler_refuse_other_dtypes(strategy):
    assert check_engine_dtype(None, strategy) == "bfloat16"
    for dtype in ("float16", "float32"):
        with pytest.raises(ValueError, match=f"dtype={dtype} is not what strategy={strategy} trains in"):
            check_engine_dtype(dtype, strategy)


@pytest.mark.parametrize(
    "fsdp_config, trained, expected",
    [
        ({}, True, ("bfloat16", "float32", "float32", False)),
        ({}, False, ("bfloat16", "float32", "bfloat16", False)),
        ({"dtype": None, "model_dtype": "fp32"}, False, ("bfloat16", "float32", "float32", False)),
        ({"dtype": "float16"}, True, ("float16", "float32", "float32", True)),
        ({"mixed_precision": {"param_dtype": "fp16"}}, False, ("float16", "float32", "float16", False)),
    ],
)
def test_missing_keys_of_a_worker_have_verls_defaults(fsdp_config, trained, expected):
    for config in (fsdp_config, OmegaConf.create(fsdp_config)):
        assert facts(Precision.of_worker(config, trained)) == expected


def test_autocast_is_disabled_in_fp32():
    product = torch.ones(2, 2).matmul
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        with warnings.catch_warnings(action="error"):  # torch warns of a dtype that it cannot cast to
            with Precision.of_worker({"dtype": dtype}, trained=True).autocast("cpu"):
                assert product(torch.ones(2, 2)).dtype == dtype
