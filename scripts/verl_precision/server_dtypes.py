"""A rollout server's names of dtypes; its ``auto`` is the dtype of the model's config.json."""

# The full name of a dtype, by the values of `rollout.dtype`.
SERVER_SPELLINGS = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}


def cache_refusal(dtype: str, cache: str) -> str | None:
    """Return why a vLLM that computes in ``dtype`` must not cache keys and values in ``cache``; None where it may.

    Its CUDA kernels write the bits of a 16-bit key into the cache and read them as the cache's dtype, without an error
    (vLLM #54338). vLLM's CPU build 0.28.0 ignores such a request: log-probabilities do not change.
    """
    if "unknown" in (dtype, cache) or cache not in SERVER_SPELLINGS.values() or cache == dtype:
        return None
    return f"vLLM writes keys and values in {dtype} and reads their bits as {cache}: fluent nonsense without an error"
