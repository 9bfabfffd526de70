"""Count the bytes of the tensors that exist."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type as is_wrapper
from torch.utils._pytree import tree_leaves


class LiveTensors:
    """The storages of tensors until they are freed, and the ``peak`` of their bytes."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.storages: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        self.peak = 0
        self.note(tensors)

    def note(self, values: Any) -> None:
        """Add the tensors among ``values``, nested as an operator returns them; where one is new, update the peak."""
        known = len(self.storages)
        for tensor in tree_leaves(values):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(local, torch.Tensor) and not is_wrapper(type(local)):
                self.storages[local.untyped_storage()._cdata] = local.untyped_storage()
        if len(self.storages) > known:
            self.peak = max(self.peak, self.total())

    def total(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())
