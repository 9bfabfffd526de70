"""What keeps the log-probabilities of trainer and rollout from being equal to the bit."""

from collections.abc import Iterator, Mapping

from verl_precision.doctor.determinism import KEY
from verl_precision.doctor.dtype_rules import UNKNOWN
from verl_precision.doctor.resolver import DtypeResolver
from verl_precision.doctor.rollout_findings import is_quantized, wire_is_lossy


def obstacles(resolver: DtypeResolver, deterministic: Mapping[str, bool]) -> Iterator[str]:
    """Yield each reason why the two cannot agree to the bit, as a clause; those that a setting removes come first.

    Args:
        deterministic: the parts of the job that full_determinism reaches.
    """
    trainer, computes, cache = (
        resolver.effective_dtype(name) for name in ("actor.autocast", "rollout.logits", "rollout.kv_cache")
    )
    if UNKNOWN not in (trainer, computes) and trainer != computes:
        yield f"the trainer computes in {trainer}, the rollout in {computes}"
    if wire_is_lossy(resolver):
        yield f"the weights reach the rollout through {resolver.effective_dtype('wire')}"
    if is_quantized(resolver):
        yield f"the rollout's weights are {resolver.effective_dtype('rollout.weights')}"
    if cache not in (computes, UNKNOWN, None):
        yield f"the KV cache is {cache}"
    server = resolver.server
    if server == "hf":
        yield "the hf rollout computes one token at a time, the trainer whole sequences"
        return
    if not deterministic["rollout"]:
        way = f" ({KEY}=false)" if server == "vllm" and resolver.config.has(KEY) else ""
        yield f"{server}'s log-probabilities depend on the batch{way}"
    yield f"trainer and {server} run different kernels, and the trainer's results depend on the micro-batch"
