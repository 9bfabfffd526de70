"""vLLM's own layers with routers, and its arguments for a head, that ``keep_fp32_modules`` names."""

from types import SimpleNamespace

import pytest
import torch
from precision import args_with_fp32_modules, keep_routers_in_fp32


@pytest.fixture
def config(tmp_path):
    """A configuration that names routers, in a process where vLLM can build layers."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path / 'store'}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        yield {"additional_config": {"keep_fp32_modules": ["model.layers.*.gate"]}, "quant_config": None}
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.mark.parametrize(
    "name, rows, changed, dtype",
    [
        ("model.layers.0.mlp.gate", 4, {}, torch.float32),
        ("model.layers.0.mlp.gate", 1, {}, torch.float16),  # a shared expert's
        ("model.layers.0.mlp.up", 4, {}, torch.float16),
        ("model.layers.0.mlp.gate", 4, {"quant_config": "fp8"}, torch.float16),
        ("model.layers.0.mlp.gate", 4, {"additional_config": {}}, torch.float16),
    ],
)
def test_a_named_router_has_fp32_weights_and_scores(config, name, rows, changed, dtype):
    from vllm.model_executor.layers.linear import ReplicatedLinear

    class OwnLinear(ReplicatedLinear):
        """Takes the change in place of vLLM's class, which other tests may build."""

    experts = SimpleNamespace(get_num_experts=lambda: 4)
    keep_routers_in_fp32(OwnLinear, SimpleNamespace(model_config=experts, **config | changed))
    layer = OwnLinear(8, rows, bias=False, params_dtype=torch.float16, prefix=name)
    torch.nn.init.constant_(layer.weight, 1 / 3)
    assert layer.weight.dtype == dtype
    layer.quant_method.process_weights_after_loading(layer)
    scores, _ = layer(torch.ones(2, 8, dtype=torch.float16))
    assert scores.dtype == dtype
    exact = torch.full((2, rows), 8 / 3)
    assert torch.allclose(scores.float(), exact, rtol=1e-6) == (dtype == torch.float32)


@pytest.mark.parametrize(
    ("given", "patterns", "expected"),
    [
        ({"seed": 1}, None, {"seed": 1}),
        ({"seed": 1}, [], {"seed": 1}),
        ({"seed": 1}, ["*.gate"], {"seed": 1, "additional_config": {"keep_fp32_modules": ["*.gate"]}}),
        (
            {"additional_config": {"own": 1}},
            ["*.gate"],
            {"additional_config": {"own": 1, "keep_fp32_modules": ["*.gate"]}},
        ),
    ],
)
def test_only_named_modules_give_vllm_an_additional_config(given, patterns, expected):
    assert args_with_fp32_modules(given, patterns, "0.24.0") == expected


QUANTIZED = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("patterns", "given", "expected"),
    [
        (["lm_head"], {}, {"head_dtype": "float32"}),
        (["*.gate", "lm_*"], QUANTIZED, QUANTIZED | {"head_dtype": "float32"}),
        (["lm_head"], {"head_dtype": "model"}, {"head_dtype": "model"}),
        (["*.gate"], QUANTIZED, QUANTIZED),
    ],
)
def test_a_named_head_is_computed_in_fp32_by_vllm(patterns, given, expected):
    changed = args_with_fp32_modules({"hf_overrides": given}, patterns, "0.28.0+cpu")
    assert changed["hf_overrides"] == expected and changed["additional_config"] == {"keep_fp32_modules": patterns}


def test_a_named_head_is_refused_where_vllm_would_ignore_it():
    with pytest.raises(ValueError) as error:
        args_with_fp32_modules({}, ["lm_head"], "0.24.0")
    words = [
        "rollout.keep_fp32_modules=['lm_head']",
        "vLLM 0.24.0",
        "vLLM 0.28 or later",
        "rollout.keep_fp32_modules=[]",
    ]
    assert all(word in str(error.value) for word in words)


def test_installed_vllm_computes_its_head_in_the_dtype_that_it_is_given(config):
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    get_current_vllm_config().model_config = SimpleNamespace(head_dtype=torch.float32)
    head = ParallelLMHead(64, 8, params_dtype=torch.float16)
    torch.nn.init.normal_(head.weight)
    hidden = torch.randn(2, 8).half()
    logits = LogitsProcessor(64)(head, hidden)
    assert logits.dtype == torch.float32 and logits.equal(hidden.float() @ head.weight[:64].float().T)
