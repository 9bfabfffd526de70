"""Choose what a GPU multiplies float32 matrices in: TF32 or float32."""

import warnings

import torch


def lacks_ampere(format_name: str) -> str:
    """Return why this GPU has no ``format_name``, TF32 or bfloat16, "" where it has: both came with Ampere."""
    if torch.cuda.get_device_capability() >= (8, 0):
        return ""
    return f"{torch.cuda.get_device_name()} has no {format_name}"


def set_tf32(on: bool) -> None:
    """Let CUDA compute products, convolutions and recurrent layers of float32 in TF32, or forbid it, in all threads.

    ``allow_tf32`` sets all three in every torch. Some from 2.9 on warn about it; their ``cudnn.rnn.fp32_precision`` has
    no effect once torch has imported the module of that name, as it does for a GRU on a GPU.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
