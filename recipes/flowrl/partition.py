"""log Z(x) from a model's hidden states: a small head beside the FSDP model, in fp32, replicated on every rank.

It is not part of the model, so it is neither sharded, cast to half precision, sent to the rollout nor exported. A loss
scale that preserves the gradients of rare tokens in fp16 would overflow those of log Z.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class PartitionHead(nn.Module):
    """(Linear, GELU, LayerNorm, Dropout) × 2, then Linear to one number (arXiv 2509.15207).

    Args:
        hidden_size: width of the model, and of the head.
        dropout: probability.
        zero_init: start from log Z = 0 for every prompt, without effect on the trunk's first gradients.
    """

    def __init__(self, hidden_size: int, dropout: float, zero_init: bool):
        super().__init__()
        blocks = [
            (nn.Linear(hidden_size, hidden_size), nn.GELU(), nn.LayerNorm(hidden_size), nn.Dropout(dropout))
            for _ in range(2)
        ]
        self.layers = nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(hidden_size, 1))
        if zero_init:
            nn.init.zeros_(self.layers[-1].weight)
            nn.init.zeros_(self.layers[-1].bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return log Z ``(rows,)`` from ``hidden`` ``(rows, hidden_size)`` of any dtype; fp32 even in autocast."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.layers(hidden.float()).squeeze(-1)


def mean_over_prompts(rows: Iterable[torch.Tensor], lengths: Iterable[int], drop_last: bool) -> torch.Tensor:
    """Return the mean hidden state of each prompt ``(rows, hidden_size)``, in fp32, with gradient.

    Args:
        rows: hidden states of each sequence ``(tokens, hidden_size)``, its prompt first.
        lengths: tokens of each prompt.
        drop_last: exclude the prompt's last token, as public code does, unless it is the only one.
    """
    ends = (max(length - drop_last, 1) for length in lengths)
    return torch.stack([row[:end].float().mean(0) for row, end in zip(rows, ends, strict=True)])


class PartitionTraining:
    """The head and its optimizer, synchronized over ranks.

    Args:
        head: broadcast from rank 0.
        lr: peak learning rate, scaled by the model's schedule.
        clip_grad: largest norm of the head's gradient.
    """

    def __init__(self, head: PartitionHead, lr: float, weight_decay: float, clip_grad: float):
        self.head, self.clip_grad, self.grad_norm = head, clip_grad, None
        for tensor in head.parameters():
            dist.broadcast(tensor.data, src=0)
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=weight_decay)

    def average_gradients(self, loss_scale: float) -> bool:
        """Unscale the gradients and average them over ranks; return whether all are finite, the same on every rank."""
        for parameter in self.head.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= loss_scale * dist.get_world_size()
        self.grad_norm = nn.utils.get_total_norm([p.grad for p in self.head.parameters()]).item()
        return math.isfinite(self.grad_norm)

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.head.parameters(), self.clip_grad)
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any], file: str, with_optimizer: bool) -> None:
        """Restore a :meth:`state_dict` read from ``file``, the optimizer's only ``with_optimizer``.

        Raises:
            ValueError: it belongs to a model of another width.
        """
        saved, width = state["head"]["layers.0.weight"].shape[0], self.head.layers[0].in_features
        if saved != width:
            raise ValueError(f"{file}: its log Z head has hidden_size={saved}, but this model has {width}")
        self.head.load_state_dict(state["head"])
        if with_optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
