"""A rollout server's names of dtypes; its ``auto`` is the dtype of the model's config.json."""

# The full name of a dtype, by the values of `rollout.dtype`.
SERVER_SPELLINGS = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
