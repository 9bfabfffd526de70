"""List what the doctor finds in a job that verl would start. FINDINGS is the table: one function a topic."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from verl_precision.doctor import dtype_rules
from verl_precision.doctor.dtype_rules import UNKNOWN
from verl_precision.doctor.fp8_rollouts import FP8_UTILS, fitting, fp8_limit
from verl_precision.doctor.resolver import KV_SPELLINGS, MODEL, ROLES, ROLLOUT, TRAINED, DtypeResolver, server_dtype
from verl_precision.facts.dtypes import SERVER_SPELLINGS, SIXTEEN_BITS, SPELLINGS
from verl_precision.facts.models import ATTENTION, float16_report, lost_softcap
from verl_precision.facts.packages import package_folder
from verl_precision.facts.vllm_float16 import ignores_head_dtype
from verl_precision.facts.vllm_float16 import version as vllm_version
from verl_precision.paths import CONFIGS
from verl_precision.sequence_weights import TRUNCATED, UNTRUNCATED
from verl_precision.words import options

# The ends of the keys that request a dtype, or a regime.
DTYPE_KEYS = ("dtype", "param_dtype", "precision")
WORK = {"actor": "trains", "critic": "trains", "ref": "computes", "reward_model": "scores"}
SPELLED = {spelling: name for name, spellings in SPELLINGS.items() for spelling in spellings} | SERVER_SPELLINGS
MASTERS = {
    "float16": "makes the optimizer's weights and state half precision: AdamW turns them to NaN",
    "bfloat16": "makes the optimizer's weights and state bfloat16: updates below 1/256 of a weight are lost",
}
REDUCES = {"float16": ", where scaled ones overflow sooner", "bfloat16": ", with 8 bits of mantissa"}
CORRECT = "correct for it (algorithm.rollout_correction)"
DETERMINISM = f"{ROLLOUT}.full_determinism"
ROUTERS = ("model.layers.0.mlp.gate", "model.layers.0.mlp.router", "model.layers.0.block_sparse_moe.gate")
FIRST_MLP = ("model.layers.0.mlp", "model.language_model.layers.0.mlp")
KV_SCALES = f"{ROLLOUT}.engine_kwargs.vllm.calculate_kv_scales"
ON_POLICY = ("rl_on_policy_target", "enable_deterministic_inference")  # of SGLang
SEED = "sampling_seed"  # of a request to SGLang
SEQUENCE_WEIGHTS = "algorithm.rollout_correction.rollout_is"
TRUNCATION = "algorithm.rollout_correction.rollout_is_threshold"
BYPASS = "algorithm.rollout_correction.bypass_mode"
MISMATCH_FREQ = "trainer.mismatch_freq"
HEADS = "verl/utils/experimental/torch_functional.py"  # verl's fused head in torch
KEPT_GRADIENT = "hidden_states.requires_grad_("  # its line from 0.9.0 on
SGLANG_HEAD = "actor_rollout_ref.rollout.engine_kwargs.sglang.enable_fp32_lm_head"
MEASURES = "verl/utils/mismatch.py"  # of a patched tree: it measures the mismatch in bypass mode


class Finding(NamedTuple):
    """One thing that is wrong, or not known.

    Args:
        key, value: the setting that it concerns.
        effect: what that does, a clause whose subject they are.
        fix: the command or the override that corrects it.
        applies: whether verl does what ``value`` requests.
    """

    key: str
    value: Any
    effect: str
    fix: str
    applies: bool = True

    @property
    def unheeded(self) -> bool:
        """True if a dtype was requested, by its key or by a regime, misspelt or not, and does not apply."""
        requests_dtype = self.key.rpartition(".")[2] in DTYPE_KEYS or self.value in options("precision")
        return requests_dtype and not self.applies

    @property
    def sentence(self) -> str:
        return f"{self.key}{'' if self.value is None else f'={self.value}'} {self.effect}"

    def json(self) -> dict[str, Any]:
        """Return the finding in ``doctor --json``."""
        return {"key": self.key, "value": self.value, "effect": self.effect, "fix": self.fix}


# --- keys -------------------------------------------------------------------------------------------------------------


def unread_keys(job: DtypeResolver) -> Iterator[Finding]:
    """Yield keys that ``+`` adds and nothing reads: a group that this tree lacks, and a misspelt name."""
    tree, added = job.tree, sorted(job.config.added_keys)
    groups = sorted(each.name for each in CONFIGS.iterdir())
    for key, value in ((key, job.get(key)) for key in added if "." not in key):
        if isinstance(value, Mapping):
            continue
        effect, near = f"is a key that nothing reads in {tree.name}", difflib.get_close_matches(key, groups, n=1)
        if key == "precision":
            effect += ": trains in {}, rolls out in {}".format(*job.dtypes("actor.compute", "rollout.weights"))
            fix = f"{dtype_rules.KEYS} brings the overlay: {tree.apply_command}"
        elif key in groups:
            fix = f"'hydra.searchpath=[file://{CONFIGS}]'"
        else:
            fix = f"+{near[0]}={value}" if near else f"remove +{key}={value}"
        yield Finding(key, value, effect, fix, applies=False)
    for key in added:
        group, _, name = key.rpartition(".")
        known = [each for each in job.get(group, {}) if f"{group}.{each}" not in added]
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
            value = job.get(key)
            yield Finding(key, value, f"is a new key beside {near[0]}", f"{group}.{near[0]}={value}", applies=False)


def unknown_files(job: DtypeResolver) -> Iterator[Finding]:
    """Yield the files by which hops cannot be resolved, because they are not the release's."""
    tree = job.tree
    if unknown := sorted(path for path, state in tree.files.items() if state == UNKNOWN):
        files = f"has other files than verl {tree.release.name} where hops are decided, now unknown: "
        yield Finding("verl", str(tree.root), files + ", ".join(unknown), f"make drift VERL={tree.root}")


# --- the trainer: its dtypes, loss scaling, optimizer, export ---------------------------------------------------------


def full_names(values: Iterable[Any]) -> set[str]:
    """Return the full names of dtypes as users spell them, for a trainer or a server."""
    return {SPELLED.get(value, str(value)) for value in values}


def remedy(job: DtypeResolver, role: str, patch: str, dtype: Any) -> str:
    """Return what makes a hop of a role follow its dtype: the patch or, on a patched tree, the key of the role."""
    return f"{ROLES[role]}.dtype={dtype}" if job.tree.precision else f"{patch}: {job.tree.apply_command}"


def ignored_dtypes(job: DtypeResolver) -> Iterator[Finding]:
    """Yield the keys that request what a role computes in, where it computes in something else."""
    for role in job.used(*ROLES):
        requested, node = job.requested_dtypes(role), job.engine_node(role)
        compute, ignored = job.effective_dtype(f"{role}.compute"), f"is ignored by {job.tree.name}: "
        if role == "reward_model" and (server_key := job.reward_server_key()):
            for key, value in requested.items():
                effect = f"{ignored}a server scores in {compute}"
                yield Finding(key, value, effect, f"{server_key}={value}", applies=False)
            continue
        if compute == UNKNOWN or (role == "ref" and job.ref_in_actor):
            continue
        effective = (compute,) if role == "reward_model" else (compute, job.effective_dtype(f"{role}.autocast"))
        implementation = job.implementation(role)
        patch = job.rule(f"{role}.compute", implementation).patch or dtype_rules.COMPUTE
        for key, value in requested.items():
            dtype = next((dtype for dtype, spellings in SPELLINGS.items() if value in spellings), None)
            if value is None or dtype in effective:
                continue
            fix = remedy(job, role, patch, value)
            if key == fix.partition("=")[0]:
                fix = f"{node}.dtype={value}"
            if dtype and not job.tree.precision and implementation == "engine" and not job.legacy:
                fix += f"; or +{node}.mixed_precision.param_dtype={value}"
            yield Finding(key, value, f"{ignored}{WORK[role]} in {compute}", fix, applies=False)


def role_dtypes(job: DtypeResolver) -> Iterator[Finding]:
    """Yield FSDP and autocast in different dtypes, and masters or gradient reduction in less than fp32."""
    for role in filter(job.on_fsdp, job.used("actor", "ref", "critic")):
        compute, autocast = job.dtypes(f"{role}.compute", f"{role}.autocast")
        if UNKNOWN not in (compute, autocast) and compute != autocast:
            param_dtype = f"{job.engine_node(role)}.mixed_precision.param_dtype"
            key, value = list((job.requested_dtypes(role) or {param_dtype: None}).items())[-1]
            halves = f"the {role}'s weights are cast to {compute} and its autocast computes in {autocast}"
            fix = remedy(job, role, dtype_rules.COMPUTE, compute)
            yield Finding(key, value, f"reaches only one half of {job.tree.name}: {halves}", fix, applies=False)
    for role in filter(job.on_fsdp, job.used(*TRAINED)):
        node = job.engine_node(role)
        master, reduce = job.dtypes(f"{role}.master", f"{role}.reduce")
        if master in SIXTEEN_BITS:
            key, fix = f"{node}.model_dtype", f"{node}.model_dtype=fp32"
            if job.trains_adapters(role):  # which the patch keeps in fp32
                fix = remedy(job, role, dtype_rules.LORA, job.effective_dtype(f"{role}.compute"))
            yield Finding(key, job.get(key), MASTERS[master], fix)
        if reduce in SIXTEEN_BITS:
            key = f"{node}.mixed_precision.reduce_dtype"
            effect = f"sums the {role}'s gradients over the ranks in {reduce}{REDUCES[reduce]}"
            yield Finding(key, job.get(key), effect, f"{key}=fp32")


def loss_scaling(job: DtypeResolver) -> Iterator[Finding]:
    """Yield fp16 without a loss scaler, settings that nothing reads, a scaler that is neither saved nor reported."""
    name, patch = job.tree.name, dtype_rules.SCALER
    for role in filter(job.on_fsdp, job.used(*TRAINED)):
        scaler, node, fix = job.scaler(role), job.engine_node(role), remedy(job, role, patch, "float16")
        if scaler and scaler["saved"]:
            continue
        why = "its scaler's settings are fixed" if scaler else "the loss is not scaled"
        for key in sorted(key for key in job.config.user_keys if key.startswith(f"{node}.grad_scaler")):
            yield Finding(key, job.get(key), f"is ignored by {name}: {why}", fix, applies=False)
        if scaler:
            lacks = "by fixed settings and neither saves the scale nor reports it or a skipped step"
            effect = f"is not a key of {name}, which scales the {role}'s loss {lacks}"
            fix = f"{patch}, {dtype_rules.SAVED}, {dtype_rules.COUNTED}: {job.tree.apply_command}"
            yield Finding(f"{node}.grad_scaler", None, effect, fix)
        elif "float16" in job.dtypes(f"{role}.compute", f"{role}.autocast"):
            key, value = next(iter(job.requested_dtypes(role).items()), (f"{node}.dtype", "float16"))
            effect = f"puts the {role} into fp16 without a loss scaler: small gradients vanish, no overflow is skipped"
            yield Finding(key, value, effect, fix)


def megatron(job: DtypeResolver) -> Iterator[Finding]:
    """Yield an overflow at which Megatron ends the run, and gradient buffers in 16 bits (verl #6526, #7485)."""
    for role in (role for role in job.used(*TRAINED) if job.implementation(role) == "megatron"):
        node, optim = job.engine_node(role), f"{ROLES[role]}.optim"
        if job.effective_dtype(f"{role}.compute") == "float16" and (job.legacy or not job.tree.precision):
            key, effect = f"{node}.dtype", "ends the run at the first overflow with a NotImplementedError"
            patch = f"{dtype_rules.SKIP}: {job.tree.apply_command}"
            yield Finding(key, job.get(key), effect, f"{ROLES[role]}.strategy=fsdp" if job.legacy else patch)
        dtype, decided, _ = job.resolve(f"{role}.reduce")
        key, grads = f"{node}.override_ddp_config.grad_reduce_in_fp32", f"{optim}.main_grads_dtype"
        if job.get(key) is False and dtype == "float32":
            effect = f"is ignored by {job.tree.name}, whose gradient buffers are always in {dtype} ({decided})"
            yield Finding(key, False, effect, f"remove {key}", applies=False)
        if dtype not in SIXTEEN_BITS:
            continue
        effect = f"adds up the {role}'s gradients, and sums them over the ranks, in {dtype}"
        if decided in (key, grads):
            yield Finding(decided, job.get(decided), effect, f"{key}=true" if decided == key else f"{grads}=fp32")
        else:
            yield Finding(key, None, f"is not set, and Megatron-Bridge's default {effect} ({decided})", f"+{key}=true")


def roles_beside_the_actor(job: DtypeResolver) -> Iterator[Finding]:
    """Yield a ref or, where no dtype was requested for it, a critic that computes in another dtype than the actor."""
    actor, ref, critic = job.dtypes("actor.compute", "ref.compute", "critic.compute")
    requested = job.requested_dtypes("actor")
    if job.uses("ref") and UNKNOWN not in (actor, ref) and actor != ref:
        role_dtype, engine_dtype, param_dtype = job.dtype_keys("ref")
        key, value = next(iter((job.requested_dtypes("ref") or requested or {engine_dtype: ref}).items()))
        fix = f"{role_dtype}={actor}" if job.tree.precision else f"+{param_dtype}={actor}"
        effect = f"leaves the actor in {actor} beside a ref in {ref}: their KL is not that of the policies"
        yield Finding(key, value, effect, fix)
    if not job.uses("critic") or job.requested_dtypes("critic") or UNKNOWN in (actor, critic) or actor == critic:
        return
    for key, value in requested.items():
        if value is not None and actor in full_names([value]):
            rule = job.rule("critic.compute", job.implementation("critic"))
            fix = f"{job.engine_node('critic')}.dtype={value}"
            if rule.patch or job.tree.precision:
                fix = remedy(job, "critic", rule.patch, value)
            yield Finding(key, value, f"does not reach the critic, which trains in {critic}", fix)


def reported_overflow(job: DtypeResolver) -> Iterator[Finding]:
    """Yield a model that overflowed in float16 elsewhere and that vLLM runs; FSDP may keep its MLPs in fp32."""
    key, patterns = f"{MODEL}.path", job.get(f"{job.engine_node('actor')}.keep_fp32_modules", [])
    kept = job.tree.precision and any(fnmatchcase(name, pattern) for name in FIRST_MLP for pattern in patterns)
    dtypes = {"trainer": not kept and job.effective_dtype("actor.compute")}
    dtypes["rollout"] = job.effective_dtype("rollout.compute")
    sides = " and ".join(side for side, dtype in dtypes.items() if dtype == "float16")
    model = str(job.get(key))
    if sides and (report := float16_report(model)):
        effect = f"{report}. Here {sides} would compute in float16"
        yield Finding(key, model, effect, f"+precision=bf16, or measure it first: make preflight MODEL={model}")


def lost_in_the_model(job: DtypeResolver) -> Iterator[Finding]:
    """Yield an attention that leaves out the cap of its logits, and an export that rounds weights trained in fp16."""
    attention = job.get(ATTENTION)
    if effect := lost_softcap(str(job.get(f"{MODEL}.path")), attention):
        yield Finding(ATTENTION, attention, effect, f"{ATTENTION}=eager")
    compute, export = job.dtypes("actor.compute", "hf_export")
    if (compute, export) == ("float16", "bfloat16"):
        effect = f"of {job.tree.name} makes {export} of a model trained in {compute}: each weight loses three bits"
        yield Finding("hf_export", None, effect, f"{dtype_rules.EXPORT}: {job.tree.apply_command}")


# --- the rollout: its dtypes, routers, determinism, and what uses the mismatch ----------------------------------------


def fused_heads(job: DtypeResolver) -> Iterator[Finding]:
    """Yield verl's fused heads where their numbers are wrong, or where their gradient may be lost."""
    key, backend = f"{MODEL}.use_fused_kernels", f"{MODEL}.fused_kernel_options.impl_backend"
    if job.get(key) is not True:
        return
    on_fsdp = job.on_fsdp("actor")
    if not on_fsdp or job.get(backend) == "triton":
        effect = "computes with Triton kernels: log p is infinite for a token whose logits are all below -104, and "
        effect += "gradients are not finite from about -100 on (verl #7439)"
        fix = f"{backend}=torch" if on_fsdp else f"{key}=false"
        yield Finding(*((backend, "triton") if on_fsdp else (key, True)), effect, fix)
        return
    source = job.tree.root / HEADS
    if not job.get(f"{MODEL}.use_remove_padding") and source.exists() and KEPT_GRADIENT not in source.read_text():
        effect = f"gives the model no gradient in {job.tree.name} if its last hidden states are not contiguous and a "
        effect += "micro-batch has several rows (verl #7235)"
        yield Finding(key, True, effect, f"{MODEL}.use_remove_padding=true")


def rollout_dtypes(job: DtypeResolver) -> Iterator[Finding]:
    """Yield a dtype that the model decides or no server takes, quantization, and a cache or a wire in other dtypes."""
    key, kwargs = f"{ROLLOUT}.dtype", f"{ROLLOUT}.engine_kwargs.{job.server}"
    value = job.get(key)
    weights, computes, cache = job.dtypes("rollout.weights", "rollout.compute", "rollout.kv_cache")
    if value == "auto":
        which = f"here {weights}" if weights != UNKNOWN else "not known before it is loaded"
        yield Finding(key, value, f"takes the dtype of the model's config.json, {which}", f"{key}=float16 or bfloat16")
    elif server_dtype(value) not in SPELLINGS:
        effect = f"is not a dtype that a rollout server takes, and {job.tree.name} does not check it"
        yield Finding(key, value, effect, f"{key}=float16")
    rest = f"embeddings, norms and lm_head stay in {computes}, the KV cache in {cache}. "
    unchecked = ", and the first weight sync is not checked" if job.tree.precision else ""
    rest += f"The small mismatch of a regime does not hold{unchecked}"
    if weights == "nvfp4" and job.get(f"{ROLLOUT}.qat.enable"):  # after quantization-aware training
        ignored, mode = (job.get(f"{ROLLOUT}.qat.{key}", []) for key in ("ignore_patterns", "mode"))
        effect = f"trains on weights rounded to {weights} ({mode}), except {', '.join(ignored)}, and samples from them"
        yield Finding(f"{job.engine_node('actor')}.qat.enable", True, f"{effect}; {rest}", CORRECT)
    elif job.is_quantized:
        quantization = next(filter(job.get, (f"{node}.quantization" for node in (ROLLOUT, kwargs))))
        effect = f"samples from quantized weights, which no dtype of the trainer's matches; {rest}"
        yield Finding(quantization, weights, effect, f"{ROLLOUT}.quantization=null, or {CORRECT}")
    effect = job.misread_cache
    if cache not in (*SPELLINGS, UNKNOWN):
        scaled = job.server == "vllm" and not job.get(KV_SCALES)
        scales = ", by scales of 1.0, as verl sends none (verl #4435)" if scaled else ""
        effect = f"rounds keys and values to {cache}{scales}; the trainer has no cache to round{unchecked}"
    if effect:
        cache_key = f"{kwargs}.kv_cache_dtype"
        yield Finding(cache_key, job.get(cache_key), effect, f"{cache_key}=auto")
    if job.wire_is_lossy:
        dtype, reason, _ = job.resolve("wire")
        effect = f"gets weights that passed through {dtype} on their way ({reason}): the rollout runs {dtype}'s values "
        fix = remedy(job, "actor", dtype_rules.SEND, job.effective_dtype("actor.compute"))
        yield Finding(key, value, f"{effect}in {weights}", fix)


def routers_of_one_side(job: DtypeResolver) -> Iterator[Finding]:
    """Yield routers that the trainer keeps in fp32 and the rollout server does not."""
    key = f"{job.engine_node('actor')}.keep_fp32_modules"
    routers = [pattern for pattern in job.get(key, []) if any(fnmatchcase(name, pattern) for name in ROUTERS)]
    if routers and job.tree.precision and job.server != "vllm":
        effect = f"is not followed by {job.server}, whose routers choose other experts in 16 bits"
        yield Finding(key, routers, effect, f"{ROLLOUT}.name=vllm")


def head_of_one_side(job: DtypeResolver) -> Iterator[Finding]:
    """Yield a head in fp32 on one side only, and a dtype of vLLM's head that the installed one ignores."""
    key, vllm = f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides.head_dtype", package_folder("vllm", job.tree.root)
    value, computes, dtype = job.get(key), *job.dtypes("rollout.compute", "rollout.logits")
    if value and job.server == "vllm" and ignores_head_dtype(job.tree.root) and server_dtype(value) != dtype:
        effect = f"is ignored by vLLM {vllm_version(vllm)}, which reads it for pooling models: its head is in {dtype}"
        yield Finding(key, value, effect, "vLLM 0.28 or later, or remove it and lm_head from keep_fp32_modules")
        return
    kept, effect = f"{job.engine_node('actor')}.keep_fp32_modules", "computes the head in fp32 only in the "
    trainer, compute = job.dtypes("actor.logits", "actor.compute")
    if trainer == "float32" != compute and dtype in SIXTEEN_BITS:
        decides = f"++{key}=float32" if value else f"remove {ROLLOUT}.keep_fp32_modules"
        if ignores_head_dtype(job.tree.root):
            decides = f"vLLM 0.28 or later, then {decides}; or remove lm_head from {kept}"
        fixes = {"vllm": decides, "sglang": f"++{SGLANG_HEAD}=true"}  # ++ also replaces a value
        fix = fixes.get(job.server, f"{kept}=[], or {ROLLOUT}.name=vllm")
        yield Finding(kept, job.get(kept), f"{effect}trainer", fix)
    if dtype == "float32" != computes and trainer in SIXTEEN_BITS:
        key = job.rollout_head_key
        fix = f"{kept}=[lm_head]" if job.tree.precision and not job.legacy else f"remove {key}"
        yield Finding(key, job.get(key), f"{effect}rollout", fix)


def fp8(job: DtypeResolver) -> Iterator[Finding]:
    """Yield FP8 weights that this verl cannot send to the installed vLLM, and scales of an FP8 cache that get stale."""
    key, vllm = f"{ROLLOUT}.quantization", package_folder("vllm", job.tree.root)
    if job.server != "vllm":
        return
    if vllm is not None and job.get(key) == "fp8" and (limit := fp8_limit(job.tree.table, vllm_version(vllm))):
        file = job.tree.root / "verl" / FP8_UTILS
        if file.exists() and limit.text in file.read_text():
            name = f"{FP8_UTILS}:{limit.line} of {job.tree.name}"
            effect = f"is not supported with vLLM {vllm_version(vllm)}: {name} {limit.effect}"
            yield Finding(key, "fp8", effect, f"{fitting(limit.release)}, or {key}=null")
    if job.get(KV_SCALES) and job.effective_dtype("rollout.kv_cache") in KV_SPELLINGS.values():
        effect = "computes the cache's scales in the first forward pass only (v1/worker/gpu_model_runner.py:4300 of "
        effect += "vLLM 0.24), and verl does not renew them after a weight sync (verl #4435)"
        yield Finding(KV_SCALES, True, effect, "remove it")


def equal_answers(job: DtypeResolver) -> Iterator[Finding]:
    """Yield SGLang's deterministic modes where verl sends no seed, so that the answers to a prompt are equal.

    verl sends ``rollout.n`` requests. SGLang gives each without a seed 42 (srt/sampling/sampling_batch_info.py:100 of
    0.5.12.post1), which with the position decides the noise; ``rl_on_policy_target`` implies the mode
    (srt/server_args.py:4304).
    """
    answers, node = job.get(f"{ROLLOUT}.n", 1), f"{ROLLOUT}.engine_kwargs.sglang"
    server = job.tree.root / "verl" / dtype_rules.SGLANG_SERVER
    requested = [f"{node}.{name}" for name in ON_POLICY if job.get(f"{node}.{name}")]
    if job.server != "sglang" or answers < 2 or not requested or not job.served or not server.exists():
        return
    sources = [*server.parent.glob("*.py"), *(job.tree.root / "verl/experimental/agent_loop").glob("*.py")]
    if "**engine_kwargs" not in server.read_text() or any(SEED in source.read_text() for source in sources):
        return
    effect = f"gives every request the seed 42, as {job.tree.name} sends no {SEED} (verl #6857): the {answers} answers "
    effect += "to a prompt are equal, and an advantage that compares them is zero (Tencent-Hunyuan/UniRL #208)"
    for key in requested:
        yield Finding(key, job.get(key), effect, "remove it")


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


def mismatch_freq(job: DtypeResolver) -> Any:
    """Return the steps between two measurements in bypass mode as the trainer reads them, -1 where nothing does."""
    return job.config.values["trainer"].get("mismatch_freq", -1) if (job.tree.root / MEASURES).exists() else -1


def bypass_mode(job: DtypeResolver) -> Iterator[Finding]:
    """Yield bypass mode, whose trainer computes no log-probabilities to compare, or a frequency that is not read."""
    freq = mismatch_freq(job)
    if not job.get(BYPASS):
        if freq != -1:
            effect = "is read only in bypass mode: otherwise the trainer computes its log-probabilities at every step"
            yield Finding(MISMATCH_FREQ, freq, effect, f"{MISMATCH_FREQ}=-1", applies=False)
        return
    if freq < 1:
        fix = f"{MISMATCH_FREQ}=10" if (job.tree.root / MEASURES).exists() else f"{BYPASS}=false"
        hidden = "training/rollout_probs_diff_* (the v1 trainer also rollout_corr/*)"
        effect = f"leaves {hidden} out of the metrics: the rollout's log-probabilities stand in for the trainer's"
        yield Finding(BYPASS, True, effect, fix)


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


# Each function yields the findings of one kind; they are printed in this order.
FINDINGS = (
    unread_keys,
    ignored_dtypes,
    role_dtypes,
    loss_scaling,
    megatron,
    roles_beside_the_actor,
    fused_heads,
    rollout_dtypes,
    routers_of_one_side,
    head_of_one_side,
    fp8,
    equal_answers,
    determinism,
    bypass_mode,
    sequence_weights,
    reported_overflow,
    lost_in_the_model,
    unknown_files,
)
