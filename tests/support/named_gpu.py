"""A plugin for vLLM: the platform of a GPU that is not here, with the compute capability of NAMED_GPU, as ``7.5``."""

import os

from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability


class NamedGpu(NonNvmlCudaPlatform):
    """vLLM's platform of NVIDIA GPUs; what it asks the driver is stated here."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*map(int, os.environ["NAMED_GPU"].split(".")))

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "named GPU"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 80 << 30

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 100


def platform() -> str:
    return f"{__name__}.NamedGpu"
