"""The Triton kernels of verl and of flash-attn that a trainer launches."""

from collections.abc import Iterator
from functools import partial

import torch

from verl_precision.kernels.cases import MODELS, Case, Model, load, load_file, tensor
from verl_precision.kernels.generations import Generation

TOKENS = 4096


def fused_head(model: Model, dtype: torch.dtype, generation: Generation, method: str) -> None:
    """Launch verl's fused linear cross entropy, forward and backward: ``fused_kernel_options.impl_backend=triton``."""
    kernels = load("verl.utils.kernel.kernels")
    # verl decides as it is imported, from the GPU that is here.
    kernels.SUPPORT_CUDA_TMA = generation.capability >= (9, 0)
    hidden, weight = tensor(TOKENS, model.hidden, dtype=dtype), tensor(model.vocabulary, model.hidden, dtype=dtype)
    labels = tensor(TOKENS, dtype=torch.int64)
    _, entropy, maximum, accumulated, entropy_b = kernels.efficient_entropy_forward(hidden, weight, labels, 0, 1.0)
    kernels.set_backward_method(getattr(kernels.BackwardEnum, method))
    gradients = tensor(TOKENS), torch.empty_like(entropy)
    rest = maximum, accumulated, entropy_b, 0, False, 1.0
    kernels.efficient_entropy_backward(*gradients, hidden, weight, labels, *rest)


def cross_entropy(model: Model, dtype: torch.dtype) -> None:
    """Launch flash-attn's cross entropy, from which verl's trainer takes log-probabilities on a GPU."""
    module = load_file("flash_attn", "ops/triton/cross_entropy.py")
    logits = tensor(TOKENS, model.vocabulary, dtype=dtype).requires_grad_()
    loss, _ = module.cross_entropy_loss(logits, tensor(TOKENS, dtype=torch.int64), inplace_backward=True)
    loss.sum().backward()


def rotary(model: Model, dtype: torch.dtype) -> None:
    module = load_file("flash_attn", "ops/triton/rotary.py")
    tables = [tensor(TOKENS, model.head_size // 2, dtype=dtype) for _ in range(2)]
    module.apply_rotary(tensor(1, TOKENS, model.heads, model.head_size, dtype=dtype), *tables)


def cases(dtype: torch.dtype, generation: Generation) -> Iterator[Case]:
    for model in MODELS:
        for method in ("_Split_Dlogits_N", "_Total_Fuse_MN", "_Total_Separate"):
            yield Case("verl: fused head", model.name, partial(fused_head, model, dtype, generation, method))
        yield Case("flash-attn: cross entropy", model.name, partial(cross_entropy, model, dtype))
        if model.head_size <= 256:  # it refuses larger ones
            yield Case("flash-attn: rotary embedding", model.name, partial(rotary, model, dtype))
