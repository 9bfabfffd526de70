"""Names of dtypes, and what an element takes. A dtype's name is torch's: ``float16``, ``bfloat16``, ``float32``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
SIXTEEN_BITS = ("float16", "bfloat16")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of an element
# The values of a trainer's dtype keys, by the dtype.
SPELLINGS = {
    "float16": ("float16", "fp16", 16, "16"),
    "bfloat16": ("bfloat16", "bf16"),
    "float32": ("float32", "fp32", 32, "32"),
}
# The dtype by the value of a rollout server's key; the server's ``auto`` is the dtype of the model's config.json.
SERVER_SPELLINGS = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}


def short_name(dtype: str) -> str:
    return next(short for short, name in SHORT_NAMES.items() if name == dtype)


def torch_dtype(short: str) -> "torch.dtype":
    import torch

    return getattr(torch, SHORT_NAMES[short])


def cache_refusal(dtype: str, cache: str) -> str | None:
    """Return why a vLLM that computes in ``dtype`` must not cache keys and values in ``cache``; None where it may.

    Its CUDA kernels write the bits of a 16-bit key into the cache and read them as the cache's dtype, without an error
    (vLLM #54338). vLLM's CPU build 0.28.0 ignores such a request: log-probabilities do not change.
    """
    if "unknown" in (dtype, cache) or cache not in SERVER_SPELLINGS.values() or cache == dtype:
        return None
    return f"vLLM writes keys and values in {dtype} and reads their bits as {cache}: fluent nonsense without an error"
