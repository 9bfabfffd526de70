"""Findings on the trainer: its dtypes, loss scaling, optimizer, LoRA and export."""

from collections.abc import Iterable, Iterator
from typing import Any

from verl_precision.doctor import dtype_rules
from verl_precision.doctor.config import select
from verl_precision.doctor.dtype_rules import MEGATRON_ENGINE, UNKNOWN
from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import MODEL, ROLES, DtypeResolver
from verl_precision.facts.dtypes import SERVER_SPELLINGS, SIXTEEN_BITS, SPELLINGS
from verl_precision.facts.models import ATTENTION, lost_softcap
from verl_precision.run.prompt_lengths import IGNORED, TRUNCATION, cuts_unasked, ways_to_fit

WORK = {"actor": "trains", "critic": "trains", "ref": "computes", "reward_model": "scores"}
SPELLED = {spelling: name for name, spellings in SPELLINGS.items() for spelling in spellings} | SERVER_SPELLINGS
MASTERS = {
    "float16": "makes the optimizer's weights and state half precision: AdamW turns them to NaN",
    "bfloat16": "makes the optimizer's weights and state bfloat16: updates below 1/256 of a weight are lost",
}
# Of megatron-core's OptimizerConfig. verl's keys of the last three take effect only in bf16.
OPTIMIZER_DTYPES = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
# The line of 0.9.1 that sets grad_reduce_in_fp32 for Megatron-Bridge, whose default is false.
EXPLICIT_REDUCTION = 'override_ddp_config["grad_reduce_in_fp32"] = not use_low_precision_main_grads'


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


def split_dtypes(job: DtypeResolver) -> Iterator[Finding]:
    """Yield FSDP and autocast in different dtypes."""
    for role in filter(job.on_fsdp, job.used("actor", "ref", "critic")):
        compute, autocast = job.dtypes(f"{role}.compute", f"{role}.autocast")
        if UNKNOWN in (compute, autocast) or compute == autocast:
            continue
        param_dtype = f"{job.engine_node(role)}.mixed_precision.param_dtype"
        key, value = list((job.requested_dtypes(role) or {param_dtype: None}).items())[-1]
        halves = f"the {role}'s weights are cast to {compute} and its autocast computes in {autocast}"
        effect = f"reaches only one half of {job.tree.name}: {halves}"
        yield Finding(key, value, effect, remedy(job, role, dtype_rules.COMPUTE, compute), applies=False)


def low_masters(job: DtypeResolver) -> Iterator[Finding]:
    """Yield masters or gradient reduction of a trained role in less than fp32."""
    for role in filter(job.on_fsdp, job.used("actor", "critic")):
        node = job.engine_node(role)
        master, reduce = job.dtypes(f"{role}.master", f"{role}.reduce")
        if master in SIXTEEN_BITS:
            key = f"{node}.model_dtype"
            fix = f"{key}=fp32"
            if job.trains_adapters(role):  # which the patch keeps in fp32
                fix = remedy(job, role, dtype_rules.LORA, job.effective_dtype(f"{role}.compute"))
            yield Finding(key, job.get(key), MASTERS[master], fix)
        if reduce in SIXTEEN_BITS:
            key = f"{node}.mixed_precision.reduce_dtype"
            effect = f"sums the {role}'s gradients over the ranks in {reduce}"
            effect += ", where scaled ones overflow sooner" if reduce == "float16" else ", with 8 bits of mantissa"
            yield Finding(key, job.get(key), effect, f"{key}=fp32")


def loss_scaling(job: DtypeResolver) -> Iterator[Finding]:
    """Yield fp16 without a loss scaler, settings that nothing reads, a scaler that is neither saved nor reported."""
    name, patch = job.tree.name, dtype_rules.SCALER
    for role in filter(job.on_fsdp, job.used("actor", "critic")):
        scaler, node, fix = job.scaler(role), job.engine_node(role), remedy(job, role, patch, "float16")
        for key in sorted(key for key in job.config.user_keys if key.startswith(f"{node}.grad_scaler")):
            if scaler is None or not scaler["saved"]:
                why = "the loss is not scaled" if scaler is None else "its scaler's settings are fixed"
                value = select(job.config.values, key)
                yield Finding(key, value, f"is ignored by {name}: {why}", fix, applies=False)
        if scaler is None and "float16" in job.dtypes(f"{role}.compute", f"{role}.autocast"):
            key, value = next(iter(job.requested_dtypes(role).items()), (f"{node}.dtype", "float16"))
            effect = f"puts the {role} into fp16 without a loss scaler: small gradients vanish, no overflow is skipped"
            yield Finding(key, value, effect, fix)
        elif scaler is not None and not scaler["saved"]:
            lacks = "by fixed settings and neither saves the scale nor reports it or a skipped step"
            effect = f"is not a key of {name}, which scales the {role}'s loss {lacks}"
            fix = f"{patch}, {dtype_rules.SAVED}, {dtype_rules.COUNTED}: {job.tree.apply_command}"
            yield Finding(f"{node}.grad_scaler", None, effect, fix)


def on_megatron(job: DtypeResolver) -> list[str]:
    return [role for role in job.used("actor", "critic") if job.implementation(role) == "megatron"]


def megatron_overflow(job: DtypeResolver) -> Iterator[Finding]:
    """Yield Megatron's loss scaler, at whose first overflow upstream ends the run."""
    for role in on_megatron(job):
        fixed = job.tree.precision and not job.legacy
        if not fixed and job.effective_dtype(f"{role}.compute") == "float16":
            key = f"{job.engine_node(role)}.dtype"
            patch = f"{dtype_rules.SKIP}: {job.tree.apply_command}"
            fix = f"{ROLES[role]}.strategy=fsdp" if job.legacy else patch
            yield Finding(key, job.get(key), "ends the run at the first overflow with a NotImplementedError", fix)


def megatron_reduction(job: DtypeResolver) -> Iterator[Finding]:
    """Yield gradients that are summed over the ranks in 16 bits, and the key, or the missing key, that decides it."""
    for role in on_megatron(job):
        node, optim = job.engine_node(role), f"{ROLES[role]}.optim"
        key, grads = f"{node}.override_ddp_config.grad_reduce_in_fp32", f"{optim}.main_grads_dtype"
        effect = f"sums the {role}'s gradients over the ranks in {job.effective_dtype(f'{role}.compute')}"
        lowered = job.get(grads, "fp32") not in SPELLINGS["float32"]  # read in any dtype
        if job.get(key) is False:
            yield Finding(key, False, effect, f"{key}=true")
        elif job.get(key):
            continue
        elif job.get(f"{optim}.use_precision_aware_optimizer") and lowered:
            yield Finding(grads, job.get(grads), effect, f"{grads}=fp32")
        elif job.get(f"{node}.use_mbridge") and job.get(f"{node}.vanilla_mbridge") is False:
            engine = job.tree.root / "verl" / MEGATRON_ENGINE
            if EXPLICIT_REDUCTION not in engine.read_text():
                unset = f"is not set, and Megatron-Bridge's default {effect}"
                yield Finding(key, None, unset, f"+{key}=true")


def megatron_optimizer(job: DtypeResolver) -> Iterator[Finding]:
    """Yield dtypes of the optimizer that are refused, not read, or that store its state in 16 bits."""
    for role, name in ((role, name) for role in on_megatron(job) for name in OPTIMIZER_DTYPES):
        optim = f"{ROLES[role]}.optim"
        key, override = f"{optim}.{name}", f"{optim}.override_optimizer_config.{name}"
        if value := job.get(override):
            effect = "reaches the optimizer as text, where it expects a dtype of torch"
            yield Finding(override, value, effect, f"remove it: the default of {name} is float32")
        if (value := job.get(key, "fp32")) in SPELLINGS["float32"]:
            continue
        if not job.get(f"{optim}.use_precision_aware_optimizer"):
            effect = f"is not read without {optim}.use_precision_aware_optimizer=true"
            yield Finding(key, value, effect, f"{key}=fp32", applies=False)
        elif job.effective_dtype(f"{role}.compute") == "float16":
            effect = "is not read by the optimizer of an fp16 trainer, which keeps float32"
            yield Finding(key, value, effect, f"{key}=fp32", applies=False)
        elif name.startswith("exp_avg"):
            yield Finding(key, value, f"stores AdamW's moments of the {role} in 16 bits", f"{key}=fp32")


def ref_beside_actor(job: DtypeResolver) -> Iterator[Finding]:
    """Yield a ref that computes in another dtype than the actor."""
    actor, ref = job.dtypes("actor.compute", "ref.compute")
    if job.uses("ref") and UNKNOWN not in (actor, ref) and actor != ref:
        role_dtype, engine_dtype, param_dtype = job.dtype_keys("ref")
        requested = job.requested_dtypes("ref") or job.requested_dtypes("actor") or {engine_dtype: ref}
        key, value = next(iter(requested.items()))
        fix = f"{role_dtype}={actor}" if job.tree.precision else f"+{param_dtype}={actor}"
        effect = f"leaves the actor in {actor} beside a ref in {ref}: their KL is not that of the policies"
        yield Finding(key, value, effect, fix)


def critic_beside_actor(job: DtypeResolver) -> Iterator[Finding]:
    """Yield an actor's dtype that does not reach the critic, where none was requested for the critic."""
    actor, critic = job.dtypes("actor.compute", "critic.compute")
    if not job.uses("critic") or job.requested_dtypes("critic") or UNKNOWN in (actor, critic) or actor == critic:
        return
    for key, value in job.requested_dtypes("actor").items():
        if value is not None and actor in full_names([value]):
            rule = job.rule("critic.compute", job.implementation("critic"))
            fix = f"{job.engine_node('critic')}.dtype={value}"
            if rule.patch or job.tree.precision:
                fix = remedy(job, "critic", rule.patch, value)
            yield Finding(key, value, f"does not reach the critic, which trains in {critic}", fix)


def uncapped_attention(job: DtypeResolver) -> Iterator[Finding]:
    """Yield an attention that leaves out the cap of the model's attention logits."""
    attention = job.get(ATTENTION)
    if effect := lost_softcap(str(job.get(f"{MODEL}.path")), attention):
        yield Finding(ATTENTION, attention, effect, f"{ATTENTION}=eager")


def ignored_truncation(job: DtypeResolver) -> Iterator[Finding]:
    """Yield a request to refuse long prompts, or to cut them elsewhere: verl's agent loop cuts them at the left."""
    value, loop = job.get(TRUNCATION), job.tree.root / "verl/experimental/agent_loop/agent_loop.py"
    cuts = loop.exists() and "_cap_text_prompt_length" in loop.read_text()
    if cuts and TRUNCATION in job.config.user_keys and cuts_unasked(value, job.get("data.filter_overlong_prompts")):
        yield Finding(TRUNCATION, value, IGNORED, ways_to_fit(), applies=False)


def lora_ranks(job: DtypeResolver) -> dict[str, Any]:
    """Return the ranks of LoRA's adapters that are set for the trained models, by their keys."""
    keys = [f"{MODEL}.lora_rank", f"{MODEL}.lora.rank", *(["critic.model.lora_rank"] * job.uses("critic"))]
    nodes = {key: job.get(key.rpartition(".")[0], {}) for key in keys}
    return {key: node[name] for key, node in nodes.items() if (name := key.rpartition(".")[2]) in node}


def negative_ranks(job: DtypeResolver) -> Iterator[Finding]:
    """Yield ranks below 0, which verl treats as 0."""
    for key, rank in lora_ranks(job).items():
        if rank < 0:
            effect = "makes no adapters: all weights are trained"
            yield Finding(key, rank, effect, f"{key}=0, or a rank of at least 1", applies=False)


def rounded_export(job: DtypeResolver) -> Iterator[Finding]:
    """Yield an export that rounds the weights of a model trained in fp16."""
    compute, export = job.dtypes("actor.compute", "hf_export")
    if (compute, export) == ("float16", "bfloat16"):
        effect = f"of {job.tree.name} makes {export} of a model trained in {compute}: each weight loses three bits"
        yield Finding("hf_export", None, effect, f"{dtype_rules.EXPORT}: {job.tree.apply_command}")
