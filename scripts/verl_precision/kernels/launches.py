"""Record what code launches with Triton, as for a GPU that is not here, without starting Triton's driver."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction, create_function_from_signature

from verl_precision.kernels.generations import Generation


@dataclass(frozen=True)
class Launch:
    """A kernel with what Triton specializes it for: the types of its arguments, its constants, its options."""

    source: ASTSource
    options: Any  # triton's CUDAOptions

    @property
    def kernel(self) -> str:
        return self.source.fn.__name__

    @property
    def key(self) -> str:
        """The hash under which Triton would cache the compiled kernel, without the GPU."""
        return f"{self.source.hash()}-{self.options.hash()}"


class Pointer:
    """What Triton reads of a tensor: its dtype, and where in the allocation, which is aligned, it begins."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.offset = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self.offset

    def ptr_range(self) -> int:
        return 0


def target(generation: Generation) -> GPUTarget:
    return GPUTarget("cuda", generation.number, 32)


@contextmanager
def recorded(generation: Generation) -> Iterator[list[Launch]]:
    """Replace every launch of a kernel in the body by a record of it, for a GPU of this generation.

    An autotuned kernel is recorded in each of its configurations. torch and code that asks it are told that the GPU is
    there; Triton's driver is never started.
    """
    backend, launches = make_backend(target(generation)), []

    def described(value: object) -> object:
        return Pointer(value) if isinstance(value, torch.Tensor) else value

    def record(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        words = {"debug": False, "instrumentation_mode": ""}
        kwargs = {name: described(value) for name, value in kwargs.items()} | words
        binder = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = binder(*map(described, args), **kwargs)
        options, signature, constants, attributes = self._pack_args(backend, kwargs, bound, specialization, options)
        launches.append(Launch(ASTSource(self, signature, constants, attributes), options))

    def record_all(self: Autotuner, *args: object, **kwargs: object) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs):
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    properties = SimpleNamespace(multi_processor_count=generation.multiprocessors, name=generation.device)
    with (
        patch.object(torch.Tensor, "is_cuda", True, create=True),
        patch.object(JITFunction, "run", record),
        patch.object(Autotuner, "run", record_all),
        patch.object(torch.cuda, "get_device_capability", lambda *_: generation.capability),
        patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        patch.object(torch.cuda, "device", lambda *_: nullcontext()),
    ):
        yield launches
