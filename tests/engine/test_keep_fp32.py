"""Modules to keep in fp32 are matched by name, and those that cannot be kept are refused."""

import pytest
import torch
from precision import check_keep_fp32, keep_in_fp32
from transformers import Qwen2Config, Qwen2ForCausalLM


@pytest.fixture(scope="module")
def small_models() -> dict[str, torch.nn.Module]:
    config = Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    tied = Qwen2Config(**config.to_dict() | {"tie_word_embeddings": True})
    models = {name: Qwen2ForCausalLM(of) for name, of in {"own head": config, "tied": tied, "flash": config}.items()}
    models["flash"].config = Qwen2Config(**config.to_dict(), attn_implementation="flash_attention_2")
    return models


@pytest.mark.parametrize(
    "model, pattern, words",
    [
        ("own head", "lm_haed", ["lm_haed matches no module of Qwen2ForCausalLM", "near it: lm_head"]),
        ("own head", "model.layers.9.mlp.down", ["model.layers.9.mlp.down matches no", "model.layers.*.mlp.down_proj"]),
        ("own head", "model.layers", ["model.layers cannot be kept", "whole transformer blocks"]),
        ("tied", "lm_head", ["it shares a weight with model.embed_tokens"]),
        ("tied", "*embed_tokens", ["it shares a weight with lm_head"]),
        ("flash", "*.self_attn", ["model.layers.0 cannot be kept", "flash attention has no fp32; set"]),
    ],
)
def test_modules_that_cannot_be_kept_are_refused_by_name(small_models, model, pattern, words):
    module = small_models[model]
    with pytest.raises(ValueError) as error:
        keep_in_fp32(module, ["model.layers.0", pattern], torch.float16, "cpu")
    assert str(error.value).startswith("keep_fp32_modules: ") and "\n" not in str(error.value)
    assert all(text in str(error.value) for text in words), error.value
    assert not any("forward" in vars(part) for part in module.modules()), "a refusal must change nothing"


def test_a_kept_head_with_fused_kernels_is_refused(small_models):
    with pytest.raises(ValueError, match="lm_head cannot be kept in fp32: fused kernels"):
        keep_in_fp32(small_models["own head"], ["lm_head"], torch.float16, "cpu", fused_head=True)


def test_a_kept_container_is_refused():
    class Experts(torch.nn.Module):
        _no_split_modules = None

        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

    with pytest.raises(ValueError, match="experts cannot be kept in fp32: it is a ModuleList, which is never called"):
        keep_in_fp32(Experts(), ["experts"], torch.float16, "cpu")


def test_keep_fp32_modules_must_be_a_list_of_names_for_an_engine_that_reads_it():
    check_keep_fp32([], "fsdp_turbo")
    for value in ("lm_head", [1], None):
        with pytest.raises(ValueError, match="keep_fp32_modules=.* must be a list"):
            check_keep_fp32(value, "fsdp")
    with pytest.raises(ValueError, match="is not read by strategy=fsdp_turbo"):
        check_keep_fp32(["lm_head"], "fsdp_turbo")
