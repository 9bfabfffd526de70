"""Findings on the rollout: dtype, quantization, KV cache, wire, routers, determinism, and what uses the mismatch."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from verl_precision.doctor.dtype_rules import SEND, UNKNOWN
from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import ROLES, ROLLOUT, DtypeResolver, server_dtype
from verl_precision.doctor.trainer_findings import remedy
from verl_precision.facts.dtypes import SPELLINGS
from verl_precision.facts.packages import package_folder
from verl_precision.facts.vllm_float16 import version
from verl_precision.sequence_weights import TRUNCATED, UNTRUNCATED

ACTOR = ROLES["actor"]
CORRECT = "correct for it (algorithm.rollout_correction)"
RECORD = f"{ROLLOUT}.enable_rollout_routing_replay"
DETERMINISM = f"{ROLLOUT}.full_determinism"
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"  # the variable by which verl's vLLM server asks for batch-invariant kernels
ROUTERS = ("model.layers.0.mlp.gate", "model.layers.0.mlp.router", "model.layers.0.block_sparse_moe.gate")
SEQUENCE_WEIGHTS = "algorithm.rollout_correction.rollout_is"
TRUNCATION = "algorithm.rollout_correction.rollout_is_threshold"
BYPASS = "algorithm.rollout_correction.bypass_mode"
MISMATCH_FREQ = "trainer.mismatch_freq"


def requested_dtype(job: DtypeResolver) -> Iterator[Finding]:
    """Yield a ``rollout.dtype`` that the model decides, or that no server takes."""
    key, weights = f"{ROLLOUT}.dtype", job.effective_dtype("rollout.weights")
    value = job.get(key)
    if value == "auto":
        which = f"here {weights}" if weights != UNKNOWN else "not known before it is loaded"
        yield Finding(key, value, f"takes the dtype of the model's config.json, {which}", f"{key}=float16 or bfloat16")
    elif server_dtype(value) not in SPELLINGS:
        effect = f"is not a dtype that a rollout server takes, and {job.tree.name} does not check it"
        yield Finding(key, value, effect, f"{key}=float16")


def quantization(job: DtypeResolver) -> Iterator[Finding]:
    """Yield a rollout whose weights are quantized, by its key or after quantization-aware training."""
    if not job.is_quantized:
        return
    weights, computes, cache = job.dtypes("rollout.weights", "rollout.logits", "rollout.kv_cache")
    rest = f"embeddings, norms and lm_head stay in {computes}, the KV cache in {cache}. "
    rest += "The small mismatch of a regime does not hold"
    if job.trains_quantized:
        ignored, mode = (job.get(f"{ROLLOUT}.qat.{key}", []) for key in ("ignore_patterns", "mode"))
        effect = f"trains on weights rounded to {weights} ({mode}), except {', '.join(ignored)}, and samples from them"
        yield Finding(f"{job.engine_node('actor')}.qat.enable", True, f"{effect}; {rest}", CORRECT)
        return
    keys = [f"{ROLLOUT}.quantization", f"{ROLLOUT}.engine_kwargs.{job.server}.quantization"]
    effect = f"samples from quantized weights, which no dtype of the trainer's matches; {rest}"
    yield Finding(next(filter(job.get, keys)), weights, effect, f"{ROLLOUT}.quantization=null, or {CORRECT}")


def kv_cache(job: DtypeResolver) -> Iterator[Finding]:
    """Yield a KV cache in another dtype than the one that the server computes in."""
    dtype, effect = job.effective_dtype("rollout.kv_cache"), job.misread_cache
    if dtype not in (*SPELLINGS, UNKNOWN):
        effect = f"rounds keys and values to {dtype}; the trainer has no cache to round"
    if effect:
        key = f"{ROLLOUT}.engine_kwargs.{job.server}.kv_cache_dtype"
        yield Finding(key, job.get(key), effect, f"{key}=auto")


def lossy_wire(job: DtypeResolver) -> Iterator[Finding]:
    """Yield a wire that rounds the weights to other 16 bits than the rollout's."""
    if job.wire_is_lossy:
        key, weights = f"{ROLLOUT}.dtype", job.effective_dtype("rollout.weights")
        dtype, reason, _ = job.resolve("wire")
        effect = f"gets weights that passed through {dtype} on their way ({reason}): the rollout runs {dtype}'s "
        fix = remedy(job, "actor", SEND, job.effective_dtype("actor.compute"))
        yield Finding(key, job.get(key), f"{effect}values in {weights}", fix)


def routers(job: DtypeResolver) -> Iterator[Finding]:
    """Yield a replay of a rollout's routes (R3), or of the old log-probabilities' (R2), that replays none.

    Yield also routers that the trainer keeps in fp32 and the rollout server does not.
    """
    strategy, kept = job.strategy("actor"), f"{job.engine_node('actor')}.keep_fp32_modules"
    # Up to 0.7.0 Megatron's worker reads the actor's key; later releases have one for each engine, and 0.7.1 both.
    keys = {f"{ACTOR}.{engine}.router_replay.mode": engine for engine in ("megatron", "veomni")}
    keys[f"{ACTOR}.router_replay.mode"] = "megatron" if job.legacy else "no engine"
    modes = {key: mode for key in keys if (mode := job.get(key)) not in (None, "disabled")}
    instead = f"{kept}=[model.layers.*.gate] routes both sides in fp32"
    fix = instead if job.tree.precision and not job.legacy else f"{ACTOR}.strategy=megatron"
    for key, mode in modes.items():
        if keys[key] != strategy:
            effect = f"is read by {keys[key]}, and strategy={strategy} recomputes the routes and replays none"
            yield Finding(key, mode, effect, fix, applies=False)
        elif mode == "R3" and not job.get(RECORD):
            yield Finding(key, mode, "replays the routes of the rollout, which does not return them", f"{RECORD}=true")
    if job.get(RECORD) and not any(keys[key] == strategy for key in modes):
        effect = f"returns the routes of the rollout to strategy={strategy}, which replays none"
        yield Finding(RECORD, True, effect, f"{RECORD}=false", applies=False)
    patterns = [pattern for pattern in job.get(kept, []) if any(fnmatchcase(name, pattern) for name in ROUTERS)]
    if patterns and job.tree.precision and job.server != "vllm":
        effect = f"is not followed by {job.server}, whose routers choose other experts in 16 bits"
        yield Finding(kept, patterns, effect, f"{ROLLOUT}.name=vllm")


def requested_determinism(job: DtypeResolver) -> dict[str, bool]:
    """Return, for each role with ``full_determinism``, whether the source of its engine reads that."""
    read = {}
    for role in job.used("actor", "ref", "critic"):
        if job.get(f"{job.engine_node(role)}.full_determinism"):
            engine = {"engine": "fsdp"}.get(job.implementation(role), job.implementation(role))
            file = job.tree.root / f"verl/workers/engine/{engine}/transformer_impl.py"  # legacy workers have none
            read[role] = file.exists() and "full_determinism" in file.read_text()
    return read


def determinism(job: DtypeResolver) -> Iterator[Finding]:
    """Yield each ``full_determinism`` that is not read, and what verl's vLLM server does with it."""
    for role, applies in requested_determinism(job).items():
        if not applies:
            code = {"worker": "legacy workers"}.get(job.implementation(role), job.implementation(role))
            effect = f"is not read by {job.tree.name}'s {code}"
            yield Finding(f"{job.engine_node(role)}.full_determinism", True, effect, "remove it")
    if not job.get(DETERMINISM):
        return
    if job.server != "vllm":
        effect = f"is not read by {job.tree.name}'s {job.server} server"
        yield Finding(DETERMINISM, True, effect, f"{ROLLOUT}.name=vllm")
        return
    if (answers := job.get(f"{ROLLOUT}.n", 1)) > 1:
        effect = f"gives all requests of a server one seed: the {answers} answers to a prompt that it samples are equal"
        yield Finding(DETERMINISM, True, effect, f"{DETERMINISM}=false")
    if job.get("trainer.use_v1") and not job.config.has("async_training"):
        effect = "sends all prompts to one server: the v1 trainer numbers no prompts, so all have the request id det-0"
        yield Finding(DETERMINISM, True, effect, "trainer.use_v1=false")
    package = package_folder("vllm", job.tree.root)
    sources = [package / each for each in ("envs.py", "model_executor/layers/batch_invariant.py")] if package else []
    if package and not any(file.exists() and BATCH_INVARIANT in file.read_text() for file in sources):
        effect = f"asks for {BATCH_INVARIANT}, which vLLM {version(package)} does not have"
        yield Finding(DETERMINISM, True, effect, "a vLLM that has it")


def measures_mismatch(job: DtypeResolver) -> bool:
    """Return whether the tree, a patched one, can measure the mismatch in bypass mode."""
    return (job.tree.root / "verl/utils/mismatch.py").exists()


def mismatch_freq(job: DtypeResolver) -> Any:
    """Return the steps between two measurements in bypass mode as the trainer reads them, -1 where nothing does."""
    return job.config.values["trainer"].get("mismatch_freq", -1) if measures_mismatch(job) else -1


def bypass_mode(job: DtypeResolver) -> Iterator[Finding]:
    """Yield bypass mode, in which the trainer computes no log-probabilities to compare, where nothing measures them.

    Yield also a frequency of measuring them that is not allowed, or not read.
    """
    freq = mismatch_freq(job)
    if not job.get(BYPASS):
        if freq != -1:
            effect = "is read only in bypass mode: otherwise the trainer computes its log-probabilities at every step"
            yield Finding(MISMATCH_FREQ, freq, effect, f"{MISMATCH_FREQ}=-1", applies=False)
        return
    if freq != -1 and (freq is True or freq < 1):
        effect = "is neither a whole number of at least 1, in steps, nor -1, which measures none"
        yield Finding(MISMATCH_FREQ, freq, effect, f"{MISMATCH_FREQ}=10")
    if freq < 1:
        hidden = "training/rollout_probs_diff_* (the v1 trainer also rollout_corr/*)"
        effect = f"leaves {hidden} out of the metrics: the rollout's log-probabilities stand in for the trainer's"
        yield Finding(BYPASS, True, effect, f"{MISMATCH_FREQ}=10" if measures_mismatch(job) else f"{BYPASS}=false")


def sequence_weights(job: DtypeResolver) -> Iterator[Finding]:
    """Yield sequence-level importance weights where trainer or rollout computes in bfloat16."""
    sides = job.dtypes("actor.compute", "rollout.weights")
    if job.get(SEQUENCE_WEIGHTS) != "sequence" or "bfloat16" not in sides:
        return
    length, threshold = job.get("data.max_response_length"), job.get(TRUNCATION)
    truncated = isinstance(threshold, int | float) and threshold <= 2
    bounds, weights = (TRUNCATED, "weights truncated at 2") if truncated else (UNTRUNCATED, "untruncated weights")
    effect = (
        f"weights whole answers by their mismatch, which is large in bfloat16. With {weights}, a small model learned "
        f"where k3 times the tokens of an answer was at most {bounds.learned:g}, and collapsed from "
        f"{bounds.collapsed:g} on"
    )
    if isinstance(length, int) and length > 0:
        learned, collapsed = (f"{bound / length:.1e}" for bound in bounds)
        effect += f": at {length} tokens, a rollout_corr/k3_kl of {learned} and {collapsed}"
    yield Finding(SEQUENCE_WEIGHTS, "sequence", effect, "+precision=fp16, or measure it first: make probe")
