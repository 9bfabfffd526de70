"""Findings on the trainer: its dtypes, loss scaling, optimizer, LoRA and export."""

from collections.abc import Iterable, Iterator
from typing import Any

from verl_precision.doctor import dtype_rules
from verl_precision.doctor.dtype_rules import MEGATRON_ENGINE, UNKNOWN
from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import MODEL, ROLES, TRAINED, DtypeResolver
from verl_precision.facts.dtypes import SERVER_SPELLINGS, SIXTEEN_BITS, SPELLINGS
from verl_precision.facts.models import ATTENTION, lost_softcap
from verl_precision.run.prompt_lengths import IGNORED, TRUNCATION, cuts_unasked, ways_to_fit

WORK = {"actor": "trains", "critic": "trains", "ref": "computes", "reward_model": "scores"}
SPELLED = {spelling: name for name, spellings in SPELLINGS.items() for spelling in spellings} | SERVER_SPELLINGS
MASTERS = {
    "float16": "makes the optimizer's weights and state half precision: AdamW turns them to NaN",
    "bfloat16": "makes the optimizer's weights and state bfloat16: updates below 1/256 of a weight are lost",
}
REDUCES = {"float16": ", where scaled ones overflow sooner", "bfloat16": ", with 8 bits of mantissa"}
# Of megatron-core's OptimizerConfig; verl's keys of them take effect only in bf16.
OPTIMIZER_DTYPES = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
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
    for role in filter(job.on_fsdp, job.used(*TRAINED)):
        master, reduce = job.dtypes(f"{role}.master", f"{role}.reduce")
        if master in SIXTEEN_BITS:
            key = f"{job.engine_node(role)}.model_dtype"
            fix = f"{key}=fp32"
            if job.trains_adapters(role):  # which the patch keeps in fp32
                fix = remedy(job, role, dtype_rules.LORA, job.effective_dtype(f"{role}.compute"))
            yield Finding(key, job.get(key), MASTERS[master], fix)
        if reduce in SIXTEEN_BITS:
            key = f"{job.engine_node(role)}.mixed_precision.reduce_dtype"
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
    """Yield an overflow at which the run ends, gradients summed in 16 bits, and dtypes of the optimizer's state."""
    for role in (role for role in job.used(*TRAINED) if job.implementation(role) == "megatron"):
        node, optim = job.engine_node(role), f"{ROLES[role]}.optim"
        compute, aware = job.effective_dtype(f"{role}.compute"), job.get(f"{optim}.use_precision_aware_optimizer")
        if compute == "float16" and (job.legacy or not job.tree.precision):
            key, effect = f"{node}.dtype", "ends the run at the first overflow with a NotImplementedError"
            patch = f"{dtype_rules.SKIP}: {job.tree.apply_command}"
            yield Finding(key, job.get(key), effect, f"{ROLES[role]}.strategy=fsdp" if job.legacy else patch)
        key, grads = f"{node}.override_ddp_config.grad_reduce_in_fp32", f"{optim}.main_grads_dtype"
        effect = f"sums the {role}'s gradients over the ranks in {compute}"
        if job.get(key) is False:
            yield Finding(key, False, effect, f"{key}=true")
        elif not job.get(key) and aware and job.get(grads, "fp32") not in SPELLINGS["float32"]:  # read in any dtype
            yield Finding(grads, job.get(grads), effect, f"{grads}=fp32")
        elif not job.get(key) and job.get(f"{node}.use_mbridge") and job.get(f"{node}.vanilla_mbridge") is False:
            if EXPLICIT_REDUCTION not in (job.tree.root / "verl" / MEGATRON_ENGINE).read_text():
                unset = f"is not set, and Megatron-Bridge's default {effect}"
                yield Finding(key, None, unset, f"+{key}=true")
        for name in OPTIMIZER_DTYPES:
            key = f"{optim}.{name}"
            value, fix = job.get(key, "fp32"), f"{key}=fp32"
            if value in SPELLINGS["float32"]:
                continue
            if not aware:
                effect = f"is not read without {optim}.use_precision_aware_optimizer=true"
                yield Finding(key, value, effect, fix, applies=False)
            elif compute == "float16":
                effect = "is not read by the optimizer of an fp16 trainer, which keeps float32"
                yield Finding(key, value, effect, fix, applies=False)
            elif name != "main_grads_dtype":
                yield Finding(key, value, f"stores AdamW's moments of the {role} in 16 bits", fix)


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
