"""Count the bytes of the tensors that exist, and the log-probabilities that take as many as a GPU's."""

import weakref
from collections.abc import Iterable, Iterator
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


class InPlaceLogProbs(torch.autograd.Function):
    """Log-probabilities like those of flash-attn's cross entropy: backward writes the gradient over the logits."""

    CHUNKS = 256  # of the rows, so that a chunk in fp32 takes little beside the logits

    @staticmethod
    def split(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        rows = max(16, -(-len(tensors[0]) // InPlaceLogProbs.CHUNKS))
        return zip(*(tensor.split(rows) for tensor in tensors), strict=True)

    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, labels)
        chunks = InPlaceLogProbs.split(logits, labels)
        return torch.cat([x.float().log_softmax(-1).gather(-1, y[:, None])[:, 0] for x, y in chunks])

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, labels = ctx.saved_tensors
        for x, y, g in InPlaceLogProbs.split(logits, labels, gradient):
            chosen = torch.zeros_like(x, dtype=torch.float32).scatter_(-1, y[:, None], 1)
            x.copy_((chosen - x.float().softmax(-1)) * g[:, None])
        return logits, None


def in_place_log_probs(logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True) -> torch.Tensor:
    """Replace verl's ``logprobs_from_logits``; ``logits``: of any shape ``(..., vocabulary)``."""
    return InPlaceLogProbs.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)).view(labels.shape)
