"""The Triton kernels of vLLM that a rollout server launches on NVIDIA GPUs."""

from collections.abc import Iterator
from functools import partial

import torch
import triton

from verl_precision.kernels.cases import EXPERTS, MODELS, Case, Model, integers, load, tensor
from verl_precision.kernels.generations import Generation

OPS = "vllm.v1.attention.ops"
SAMPLE = "vllm.v1.worker.gpu.sample"
SEQUENCES, TOKENS, BLOCKS, BLOCK_SIZE, SEGMENTS = 64, 4096, 1000, 16, 16


def become(generation: Generation) -> None:
    """Make vLLM take this machine for one with a GPU of this generation, before it imports a kernel.

    vLLM chooses tile sizes by its platform, and replaces Triton by placeholders where it finds no GPU.
    """
    import vllm.platforms
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    class GpuPlatform(Platform):
        _enum = PlatformEnum.CUDA
        device_name = device_type = "cuda"
        dispatch_key = "CUDA"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*generation.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return generation.device

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return generation.multiprocessors

    vllm.platforms._current_platform = GpuPlatform()
    import triton.language.extra.libdevice
    import vllm.triton_utils
    from triton.experimental import gluon
    from triton.language.core import _aggregate

    real = {"triton": triton, "tl": triton.language, "tldevice": triton.language.extra.libdevice}
    real |= {"gluon": gluon, "gl": gluon.language, "aggregate": _aggregate, "HAS_TRITON": True}
    for name, value in real.items():
        setattr(vllm.triton_utils, name, value)
    import vllm._custom_ops

    for name in ("scaled_mm_supports_fp8", "scaled_mm_supports_block_fp8", "group_gemm_supported"):
        # Asked as modules are imported, of an extension that needs a driver.
        setattr(vllm._custom_ops, f"cutlass_{name}", lambda capability: False)


def attention(model: Model, dtype: torch.dtype) -> None:
    """Launch unified attention: prefills with decodes, then only decodes, which are split into segments."""
    unified = load(f"{OPS}.triton_unified_attention", "unified_attention")
    cache = tensor(BLOCKS, BLOCK_SIZE, model.kv_heads, model.head_size, dtype=dtype)
    window = (model.window - 1, 0) if model.window else (-1, -1)
    table = integers(SEQUENCES, 256)
    partial_results = {
        "seq_threshold_3D": 2 * SEQUENCES,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": tensor(SEQUENCES, model.heads, SEGMENTS, triton.next_power_of_2(model.head_size)),
        "softmax_segm_max": tensor(SEQUENCES, model.heads, SEGMENTS),
        "softmax_segm_expsum": tensor(SEQUENCES, model.heads, SEGMENTS),
    }
    for tokens, longest in ((TOKENS, 512), (SEQUENCES, 1)):
        query = tensor(tokens, model.heads, model.head_size, dtype=dtype)
        starts, lengths = integers(SEQUENCES + 1), integers(SEQUENCES)
        sizes = query, cache, cache, torch.empty_like(query), starts, longest, lengths, 2048
        settings = model.head_size**-0.5, True, window, table, model.softcap, None, None, None
        unified(*sizes, *settings, **partial_results)


def reshape_and_cache(model: Model, dtype: torch.dtype) -> None:
    write = load(f"{OPS}.triton_reshape_and_cache_flash", "triton_reshape_and_cache_flash")
    key = tensor(TOKENS, model.kv_heads, model.head_size, dtype=dtype)
    cache = tensor(BLOCKS, BLOCK_SIZE, model.kv_heads, model.head_size, dtype=dtype)
    write(key, key, cache, cache, tensor(TOKENS, dtype=torch.int64), "auto", tensor(1), tensor(1))


def merge_states(model: Model, dtype: torch.dtype) -> None:
    merge = load(f"{OPS}.triton_merge_attn_states", "merge_attn_states")
    output, lse = tensor(TOKENS, model.heads, model.head_size, dtype=dtype), tensor(model.heads, TOKENS)
    merge(output, output, lse, output, lse, lse)


def prefill(model: Model, dtype: torch.dtype) -> None:
    """Launch the attention of encoders, which has no cache."""
    attend = load(f"{OPS}.triton_prefill_attention", "context_attention_fwd")
    query = tensor(TOKENS, model.heads, model.head_size, dtype=dtype)
    key = tensor(TOKENS, model.kv_heads, model.head_size, dtype=dtype)
    attend(query, key, key, torch.empty_like(query), integers(SEQUENCES), integers(SEQUENCES), 512, is_causal=False)


def latent_decode(dtype: torch.dtype) -> None:
    """Launch the decoding of DeepSeek-V2-Lite's latent attention: 16 heads, a latent of 512 and 64 rotary values."""
    decode = load(f"{OPS}.triton_decode_attention", "decode_attention_fwd")
    heads, latent, size = 16, 512, 576
    cache = tensor(BLOCKS, BLOCK_SIZE, 1, size, dtype=dtype)
    query, output = tensor(SEQUENCES, heads, size, dtype=dtype), tensor(SEQUENCES, heads, latent, dtype=dtype)
    lse, splits = tensor(SEQUENCES, heads, dtype=dtype), tensor(SEQUENCES, heads, 4, latent + 1)
    rest = integers(SEQUENCES, 256), integers(SEQUENCES), splits, 4, size**-0.5, BLOCK_SIZE
    scales = {"k_scale": tensor(1), "v_scale": tensor(1)}
    decode(query, cache, cache[..., :latent], output, lse, *rest, is_mla=True, **scales)


def experts(sizes: tuple[int, int, int, int], dtype: torch.dtype, tokens: int) -> None:
    """Launch both multiplications of a layer of experts, in the configuration that vLLM picks for ``tokens``."""
    module = load("vllm.model_executor.layers.fused_moe.fused_moe")
    count, top, intermediate, hidden = sizes
    up = tensor(count, 2 * intermediate, hidden, dtype=dtype)
    down = tensor(count, hidden, intermediate, dtype=dtype)
    config = module.try_get_optimal_moe_config(tuple(up.shape), tuple(down.shape), top, None, tokens)
    compute = triton.language.float16 if dtype == torch.float16 else triton.language.bfloat16
    order, owners = integers(tokens * top + count * config["BLOCK_SIZE_M"]), integers(count)
    for weights, inputs, routed in ((up, tokens, False), (down, tokens * top, True)):
        values = tensor(inputs, weights.shape[2], dtype=dtype)
        results = tensor(tokens, top, weights.shape[1], dtype=dtype)
        chosen = tensor(tokens, top), order, owners, integers(1), routed, 1 if routed else top, config, compute
        module.invoke_fused_moe_triton_kernel(values, weights, results, None, None, *chosen, *[False] * 5)


def sampling(model: Model) -> None:
    """Launch what turns logits, which are fp32 here, into tokens and their log-probabilities."""
    logits, rows = tensor(SEQUENCES, model.vocabulary), integers(SEQUENCES)
    numbers, positions = tensor(SEQUENCES), tensor(SEQUENCES, dtype=torch.int64)
    cut = load("vllm.v1.sample.ops.topk_topp_triton", "apply_top_k_top_p_triton")
    for top_k, top_p in ((rows, numbers), (rows, None), (None, numbers)):
        cut(logits, top_k, top_p)
    load(f"{SAMPLE}.gumbel", "apply_temperature")(logits, rows, numbers)
    load(f"{SAMPLE}.gumbel", "gumbel_sample")(logits, rows, numbers, positions, positions, True)
    load(f"{SAMPLE}.min_p", "apply_min_p")(logits, rows, numbers)
    load(f"{SAMPLE}.logprob", "compute_token_logprobs")(logits, tensor(SEQUENCES, 1, dtype=torch.int64))
    counted = integers(SEQUENCES, triton.cdiv(model.vocabulary, 32)), integers(SEQUENCES, model.vocabulary)
    penalties = load(f"{SAMPLE}.penalties", "apply_penalties")
    penalties(logits, rows, rows, rows, numbers, numbers, numbers, *counted)


def batch_invariant(model: Model, dtype: torch.dtype, generation: Generation) -> None:
    """Launch the kernels whose results do not depend on the batch: ``VLLM_BATCH_INVARIANT=1``."""
    module = load("vllm.model_executor.layers.batch_invariant")
    module._fp16_block_size_n = 256 if generation.shared > 106496 else 128  # as enable_batch_invariant_mode sets it
    hidden, weight = tensor(TOKENS, model.hidden, dtype=dtype), tensor(model.hidden, model.hidden, dtype=dtype)
    module.matmul_persistent(hidden, weight)
    module.bmm_batch_invariant(hidden.unsqueeze(0), weight.unsqueeze(0))
    module.log_softmax(tensor(TOKENS, model.vocabulary, dtype=dtype))
    module.mean_dim(hidden, -1)
    module.rms_norm_batch_invariant(hidden, tensor(model.hidden, dtype=dtype))


def cases(dtype: torch.dtype, generation: Generation) -> Iterator[Case]:
    attentions = {"unified attention": attention, "write to the cache": reshape_and_cache}
    attentions |= {"merge of attention": merge_states, "attention of encoders": prefill}
    for model in MODELS:
        for name, function in attentions.items():
            yield Case(f"vLLM: {name}", model.name, partial(function, model, dtype))
        yield Case("vLLM: sampling", model.name, partial(sampling, model))
        yield Case("vLLM: batch-invariant", model.name, partial(batch_invariant, model, dtype, generation))
    yield Case("vLLM: latent attention", "DeepSeek-V2-Lite", partial(latent_decode, dtype))
    for name, sizes in EXPERTS.items():
        for tokens in (16, 64, 256, 8192):
            yield Case("vLLM: experts", f"{name}, {tokens} tokens", partial(experts, sizes, dtype, tokens))
