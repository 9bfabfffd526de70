"""vLLM's own layers with routers that ``keep_fp32_modules`` names."""

from types import SimpleNamespace

import pytest
import torch
from precision import engine_kwargs_with_routers, keep_routers_in_fp32


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
    assert engine_kwargs_with_routers(given, patterns) == expected
