"""Choose what a GPU multiplies float32 matrices in: TF32 or float32."""

import torch


def lacks_ampere(format_name: str) -> str:
    """Return why this GPU has no ``format_name``, TF32 or bfloat16, "" where it has: both came with Ampere."""
    if torch.cuda.get_device_capability() >= (8, 0):
        return ""
    return f"{torch.cuda.get_device_name()} has no {format_name}"


def set_tf32(on: bool) -> None:
    """Let CUDA compute products, convolutions and recurrent layers of float32 in TF32, or forbid it, in all threads.

    torch 2.9 and later take this in ``fp32_precision``, and raise where it was set both ways; earlier ones in
    ``allow_tf32``.
    """
    cudnn = torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        for of in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
            of.fp32_precision = "tf32" if on else "ieee"
    else:
        torch.backends.cuda.matmul.allow_tf32 = cudnn.allow_tf32 = on
