"""Findings on the rollout: its dtype, quantization and KV cache, and the wire that sends its weights."""

from collections.abc import Iterator

from lib.doctor.dtype_rules import GENERATE, SEND, UNKNOWN
from lib.doctor.finding import Finding
from lib.doctor.resolver import ROLLOUT, SIXTEEN_BITS, SPELLINGS, DtypeResolver, server_dtype


def rollout_findings(resolver: DtypeResolver) -> Iterator[Finding]:
    yield from requested_dtype(resolver)
    yield from quantization(resolver)
    yield from kv_cache(resolver)
    yield from lossy_wire(resolver)


def requested_dtype(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield a ``rollout.dtype`` that is ignored, that the model decides, or that no server takes."""
    get, tree, key = resolver.config.get, resolver.tree, f"{ROLLOUT}.dtype"
    weights, logits = (resolver.effective_dtype(f"rollout.{what}") for what in ("weights", "logits"))
    value, requested = get(key), key in resolver.config.user_keys
    if get(f"{ROLLOUT}.name") == "hf" and logits not in (UNKNOWN, server_dtype(value)) and requested:
        effect = f"is ignored by the hf rollout of {tree.name}: samples in {logits}"
        yield Finding(key, value, effect, f"{GENERATE}: {tree.apply_command}", applies=False)
    elif value == "auto":
        which = f"here {weights}" if weights != UNKNOWN else "not known before it is loaded"
        yield Finding(key, value, f"takes the dtype of the model's config.json, {which}", f"{key}=float16 or bfloat16")
    elif server_dtype(value) not in SPELLINGS:
        effect = f"is not a dtype that a rollout server takes, and {tree.name} does not check it"
        yield Finding(key, value, effect, f"{key}=float16")


def quantization(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield a rollout whose weights are quantized."""
    weights = resolver.effective_dtype("rollout.weights")
    if weights in SPELLINGS or weights == UNKNOWN:
        return
    get = resolver.config.get
    keys = [f"{ROLLOUT}.quantization", f"{ROLLOUT}.engine_kwargs.{get(f'{ROLLOUT}.name')}.quantization"]
    yield Finding(
        next(key for key in keys if get(key)),
        weights,
        "samples from quantized weights, which no dtype of the trainer's matches",
        f"{ROLLOUT}.quantization=null, or correct for it (algorithm.rollout_correction)",
    )


def kv_cache(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield a KV cache in fewer bits than the dtypes that a trainer computes in."""
    dtype = resolver.effective_dtype("rollout.kv_cache")
    if dtype in SPELLINGS or dtype in (None, UNKNOWN):
        return
    key = f"{ROLLOUT}.engine_kwargs.{resolver.config.get(f'{ROLLOUT}.name')}.kv_cache_dtype"
    effect = f"rounds keys and values to {dtype}; the trainer has no cache to round"
    yield Finding(key, resolver.config.get(key), effect, f"{key}=auto")


def lossy_wire(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield a wire that rounds the weights to other 16 bits than the rollout's."""
    if wire_is_lossy(resolver):
        wire, weights, key = resolver.resolve("wire"), resolver.effective_dtype("rollout.weights"), f"{ROLLOUT}.dtype"
        dtype = wire.effective_dtype
        yield Finding(
            key,
            resolver.config.get(key),
            f"gets weights that passed through {dtype} on their way ({wire.reason}): the rollout runs {dtype}'s values "
            f"in {weights}",
            f"{SEND}: {resolver.tree.apply_command}",
        )


def wire_is_lossy(resolver: DtypeResolver) -> bool:
    """Return whether the wire rounds the actor's weights to 16 bits other than the rollout's."""
    wire, weights = (resolver.effective_dtype(name) for name in ("wire", "rollout.weights"))
    return wire in SIXTEEN_BITS and wire not in (weights, resolver.base("actor")) and weights in SPELLINGS
