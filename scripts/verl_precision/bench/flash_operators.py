"""Operators that take as much memory as those of flash-attn."""

from collections.abc import Iterator

import torch


class Attention(torch.autograd.Function):
    """Shapes and dtypes of flash-attn 2's attention, without numbers.

    Forward keeps the queries, keys, values, outputs, and log-sum-exps in fp32. Backward takes the queries' gradient in
    fp32, and those of keys and values for every head, before it sums them (``csrc/flash_attn/flash_api.cpp``).
    """

    @staticmethod
    def forward(ctx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, out.new_empty(out.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, sums = ctx.saved_tensors
        in_backward = [torch.empty_like(sums), torch.empty_like(query, dtype=torch.float32)]
        gradients = tuple(torch.empty_like(each) for each in (query, key, value))
        if key.shape != query.shape:
            in_backward += [torch.empty_like(query) for _ in (key, value)]
        return gradients


class InPlaceLogProbs(torch.autograd.Function):
    """Log-probabilities whose backward writes the gradient over the logits, as flash-attn's cross entropy does."""

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
