"""Findings on the rollout: its dtype, quantization and KV cache, and the wire that sends its weights."""

from collections.abc import Iterator

from verl_precision.doctor.dtype_rules import GENERATE, SEND, UNKNOWN
from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import ROLLOUT, DtypeResolver, server_dtype
from verl_precision.doctor.trainer_findings import remedy
from verl_precision.facts.dtypes import SIXTEEN_BITS, SPELLINGS, cache_refusal

CORRECT = "correct for it (algorithm.rollout_correction)"
NO_REGIME = "The small mismatch of a regime does not hold"


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
    if resolver.server == "hf" and logits not in (UNKNOWN, server_dtype(value)) and requested:
        effect = f"is ignored by the hf rollout of {tree.name}: samples in {logits}"
        mend = f"{key}={logits}" if tree.precision else f"{GENERATE}: {tree.apply_command}"
        yield Finding(key, value, effect, mend, applies=False)
    elif value == "auto":
        which = f"here {weights}" if weights != UNKNOWN else "not known before it is loaded"
        yield Finding(key, value, f"takes the dtype of the model's config.json, {which}", f"{key}=float16 or bfloat16")
    elif server_dtype(value) not in SPELLINGS:
        effect = f"is not a dtype that a rollout server takes, and {tree.name} does not check it"
        yield Finding(key, value, effect, f"{key}=float16")


def is_quantized(resolver: DtypeResolver) -> bool:
    weights = resolver.effective_dtype("rollout.weights")
    return weights not in SPELLINGS and weights != UNKNOWN


def quantization(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield a rollout whose weights are quantized, by a key of its own or after quantization-aware training."""
    if not is_quantized(resolver):
        return
    get = resolver.config.get
    computes, cache = (resolver.effective_dtype(f"rollout.{what}") for what in ("logits", "kv_cache"))
    rest = f"embeddings, norms and lm_head stay in {computes}, the KV cache in {cache}"
    if trained := resolver.trained_quantization:
        ignored = ", ".join(get(f"{ROLLOUT}.qat.ignore_patterns", []))
        mode = get(f"{ROLLOUT}.qat.mode")
        effect = f"trains on weights rounded to {trained} ({mode}), but for {ignored}, and samples from these; {rest}"
        yield Finding(f"{resolver.engine_node('actor')}.qat.enable", True, f"{effect}. {NO_REGIME}", CORRECT)
        return
    keys = [f"{ROLLOUT}.quantization", f"{ROLLOUT}.engine_kwargs.{resolver.server}.quantization"]
    effect = f"samples from quantized weights, which no dtype of the trainer's matches; {rest}"
    weights = resolver.effective_dtype("rollout.weights")
    mend = f"{ROLLOUT}.quantization=null, or {CORRECT}"
    yield Finding(next(key for key in keys if get(key)), weights, f"{effect}. {NO_REGIME}", mend)


def kv_cache(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield a KV cache in another dtype than the one that the server computes in."""
    dtype = resolver.effective_dtype("rollout.kv_cache")
    effect = reinterpreted(resolver)
    if effect is None and (dtype in SPELLINGS or dtype in (None, UNKNOWN)):
        return
    key = f"{ROLLOUT}.engine_kwargs.{resolver.server}.kv_cache_dtype"
    effect = effect or f"rounds keys and values to {dtype}; the trainer has no cache to round"
    yield Finding(key, resolver.config.get(key), effect, f"{key}=auto")


def reinterpreted(resolver: DtypeResolver) -> str | None:
    """Return what vLLM does with a KV cache whose 16 bits are of another dtype than its keys; None without one."""
    if resolver.server != "vllm":
        return None
    computes, cache = (resolver.effective_dtype(f"rollout.{what}") for what in ("logits", "kv_cache"))
    return cache_refusal(computes, cache)


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
            remedy(resolver, "actor", SEND, resolver.effective_dtype("actor.compute")),
        )


def wire_is_lossy(resolver: DtypeResolver) -> bool:
    """Return whether the wire rounds the actor's weights to 16 bits other than the rollout's."""
    wire, weights = (resolver.effective_dtype(name) for name in ("wire", "rollout.weights"))
    return wire in SIXTEEN_BITS and wire not in (weights, resolver.base("actor")) and weights in SPELLINGS
