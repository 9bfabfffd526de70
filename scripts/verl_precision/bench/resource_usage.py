"""Measure the resources that a training uses: bytes of tensors."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AliveTensors(TorchDispatchMode):
    """Counts the bytes alive at once of the tensors made in its context; what a kernel allocates inside is left out."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.storages:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata)
        return out

    def _gone(self, key: int) -> None:
        self.now -= self.storages.pop(key)


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield what returns the peak bytes of the tensors made in this context; on a GPU its allocator's peak."""
    if device.type == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield lambda: torch.cuda.max_memory_allocated() - before
    else:
        with AliveTensors() as alive:
            yield lambda: alive.peak


def too_large(needed: int, device: str) -> str:
    """Return why ``needed`` bytes do not fit into the free memory, "" where they do."""
    gc.collect()  # modules under FSDP are in reference cycles
    if device == "cuda":
        torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    return "" if needed <= free else f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"


def allocate_workspaces() -> None:
    """Let cuBLAS allocate its workspaces on the GPU, which stay, so that no peak of memory includes them.

    The backward pass has its own: autograd runs it in another thread.
    """
    for dtype in (torch.float32, torch.float16):
        some = torch.ones(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(some, some, some[0]).sum().backward()


PEAK_MEMORY_METHOD = {
    "cpu": "the most bytes of tensors alive at once, from the first weight to the second update; what kernels need "
    "inside is not in it",
    "cuda": "torch.cuda.max_memory_allocated, from the first weight to the second update, above what was there before",
}
