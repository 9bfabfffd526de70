"""Count floating-point operations by the dtype in which they run."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from verl.utils.precision import dtype_name

RNN_LAYERS = (torch.ops.aten._cudnn_rnn, torch.ops.aten.mkldnn_rnn_layer)  # one operation each, without a FLOP formula


class MultiplicationDtypes(TorchDispatchMode):
    """Counts the floating-point operations of matrix products, convolutions, attention and RNNs, by dtype.

    The requested dtype and the dtype of an output both mislead: autocast casts only some operations, and a GRU's output
    is fp32 where its products are fp16.
    """

    def __init__(self):
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        count = flop_registry.get(operation._overloadpacket)
        if count is not None:
            dtype = next(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
            self.flops[dtype_name(dtype)] += count(*args, **kwargs, out_val=out)
        elif operation._overloadpacket in RNN_LAYERS:
            steps = args[0][..., 0].numel()  # (T, N, F), or packed (T · N, F)
            weights = [leaf for leaf in tree_leaves(args[1:5]) if isinstance(leaf, torch.Tensor) and leaf.ndim == 2]
            self.flops[dtype_name(args[0].dtype)] += 2 * steps * sum(weight.numel() for weight in weights)
        return out

    def shares(self) -> dict[str, float]:
        """Return each dtype's share of the operations, the largest first; empty before the first operation."""
        return {dtype: flops / self.flops.total() for dtype, flops in self.flops.most_common()}
