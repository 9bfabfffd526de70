"""Run verl 0.9 without a GPU: a CPU platform for verl's plugin registry.

Loaded in every process by ``VERL_USE_EXTERNAL_MODULES=recipes.cpu.platform``, with ``VERL_PLATFORM=cpu`` and
``VERL_ENGINE_DEVICE=cuda`` (the FSDP engines are registered for "cuda" and run on any device).
"""

from contextlib import contextmanager

import torch

from recipes.cpu import host
from verl.plugin.platform import PlatformBase, PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The host's processors as one accelerator.

    Ray schedules workers by its resource "GPU": declare one per worker, ``ray_kwargs.ray_init.num_gpus``.
    """

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return host.CpuDevice("cpu")

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
        return False  # weights are sent to the rollout through shared memory

    def cudart(self) -> None:
        return None


host.adapt()
