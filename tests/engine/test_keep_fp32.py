"""Modules to keep in fp32 are matched by name, and those that cannot be kept are refused."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from precision import keep_in_fp32
from precision.keep_fp32 import check_keep_fp32, listed_in_fp32, star
from precision.vllm_fp32 import fp32_parameters
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM


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


@pytest.mark.parametrize(
    "name, why",
    [("experts", "it is a ModuleList, which is never called"), ("experts.0", "it is in one of experts, which")],
)
def test_kept_experts_are_refused(name, why):
    class Experts(torch.nn.Module):
        _no_split_modules = None

        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

    with pytest.raises(ValueError, match=f"{name} cannot be kept in fp32: {why}"):
        keep_in_fp32(Experts(), [name], torch.float16, "cpu")


def test_keep_fp32_modules_must_be_a_list_of_names_for_an_engine_that_reads_it():
    check_keep_fp32([], "fsdp_turbo")
    for value in ("lm_head", [1], None):
        with pytest.raises(ValueError, match="keep_fp32_modules=.* must be a list"):
            check_keep_fp32(value, "fsdp")
    with pytest.raises(ValueError, match="is not read by strategy=fsdp_turbo"):
        check_keep_fp32(["lm_head"], "fsdp_turbo")


SMALL = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "vocab_size": 16, "pad_token_id": 0}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
DENSE = {"first_k_dense_replace": 0, "moe_layer_start_index": 0, "num_dense_layers": 0}


def mixture(family: str) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **SMALL, **HEADS, **DENSE, **dict.fromkeys(EXPERTS, 4), num_experts_per_tok=2)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "family, kept, declined",
    [
        ("ernie4_5_moe", {torch.float16: ["gate"], torch.bfloat16: ["gate"]}, []),
        ("glm4_moe", {}, []),  # a buffer, which FSDP leaves in fp32
        ("gpt_oss", {torch.float16: ["post_attention_layernorm", "input_layernorm", "norm"]}, []),
        ("afmoe", {torch.float16: ["k_norm", "q_norm"]}, ["model.layers.*.mlp.expert_bias"]),
        ("qwen3_moe", {}, []),
    ],
)
def test_what_the_models_class_lists_is_kept_as_transformers_loads_it(tmp_path, dtype, family, kept, declined):
    model = mixture(family)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    assert listed_in_fp32(model, dtype) == [name for name, tensor in loaded.items() if tensor.dtype == torch.float32]
    names = keep_in_fp32(model, [], dtype, "cpu").names()
    assert set(kept.get(dtype, [])) <= {name.rpartition(".")[2] for name in names.get("keep_fp32", [])}
    assert bool(kept.get(dtype)) == ("keep_fp32" in names)
    assert list(names.get("not_kept_fp32", {})) == (declined if dtype == torch.float16 else [])
    assert not keep_in_fp32(mixture(family), [], torch.float32, "cpu").names()


def test_a_listed_buffer_that_fsdp1_casts_is_reported():
    names = keep_in_fp32(mixture("glm4_moe"), [], torch.float16, "cpu", buffers=torch.bfloat16).names()
    assert names["not_kept_fp32"]["model.layers.*.mlp.gate.e_score_correction_bias"].startswith("FSDP1 casts buffers")


def test_a_kept_router_returns_fp32_scores_and_other_kept_modules_do_not():
    model = mixture("glm4_moe")
    keep_in_fp32(model, ["model.layers.*.gate", "model.layers.*.shared_experts"], torch.bfloat16, "cpu")
    block, hidden = model.model.layers[0].mlp, torch.ones(1, 3, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert block.gate(hidden).dtype == torch.float32
        assert block.shared_experts(hidden).dtype == torch.bfloat16


@pytest.mark.parametrize("model", ["own head", "tied"])
def test_a_kept_head_multiplies_in_fp32_by_its_weight_in_the_compute_dtype(small_models, model):
    module = copy.deepcopy(small_models[model])
    kept = keep_in_fp32(module, ["lm_head"], torch.float16, "cpu")
    assert not kept and kept.names() == {"keep_fp32": ["lm_head"]}, "FSDP must gather it with the embeddings"
    module.half()
    hidden = torch.randn(1, 3, 8).half()
    with torch.autocast("cpu", torch.float16):
        logits = module.lm_head(hidden)
    assert logits.dtype == torch.float32 and logits.equal(hidden.float() @ module.lm_head.weight.float().T)
    logits.sum().backward()
    assert module.lm_head.weight.grad.dtype == torch.float16
    assert (module.lm_head.weight is module.model.embed_tokens.weight) == (model == "tied")


def test_a_kept_head_adds_its_lora_adapter_in_fp32(small_models):
    module = copy.deepcopy(small_models["own head"])
    adapted = get_peft_model(module, LoraConfig(r=2, lora_alpha=2, target_modules=["lm_head"]))
    torch.nn.init.normal_(module.lm_head.lora_B["default"].weight)
    assert keep_in_fp32(adapted, ["lm_head"], torch.float16, "cpu").names() == {"keep_fp32": ["lm_head"]}
    adapted.half()
    hidden, head = torch.randn(1, 3, 8).half(), module.lm_head
    weight = head.weight.float() + head.lora_B["default"].weight.float() @ head.lora_A["default"].weight.float()
    with torch.autocast("cpu", torch.float16):
        logits = head(hidden)
    assert logits.dtype == torch.float32 and torch.allclose(logits, hidden.float() @ weight.T, rtol=1e-5, atol=1e-6)


def test_vllm_reports_the_parameters_in_fp32():
    model = mixture("glm4_moe").half()
    assert fp32_parameters(model) == {} == fp32_parameters(mixture("glm4_moe"))
    for layer in model.model.layers:
        layer.mlp.gate.float()
    assert fp32_parameters(model) == {"fp32": ["model.layers.*.mlp.gate.weight"]}


def test_layers_and_experts_of_two_digits_are_named_together():
    assert star("model.layers.3.mlp.experts.127.up") == star("model.layers.12.mlp.experts.4.up")
