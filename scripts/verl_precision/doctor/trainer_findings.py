"""Findings on the trainer: ignored dtypes, masters, loss scaling, ref, critic, the cap of attention, and export."""

from collections.abc import Iterable, Iterator
from typing import Any

from verl_precision.doctor import dtype_rules
from verl_precision.doctor.config import select
from verl_precision.doctor.dtype_rules import UNKNOWN, rule_for
from verl_precision.doctor.finding import Finding
from verl_precision.doctor.megatron_findings import megatron_findings
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


def full_names(values: Iterable[Any]) -> set[str]:
    """Return the full names of dtypes as users spell them, for a trainer or a server."""
    return {SPELLED.get(value, str(value)) for value in values}


def trainer_findings(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield the findings on roles and loss scaling, role by role."""
    for role in ROLES:
        if resolver.uses(role):
            yield from ignored_dtypes(resolver, role)
            yield from split_dtypes(resolver, role)
            yield from low_masters(resolver, role)
    for role in ("actor", "critic"):
        if resolver.uses(role) and resolver.implementation(role) == "megatron":
            yield from megatron_findings(resolver, role)
        elif resolver.uses(role) and resolver.on_fsdp(role):
            yield from loss_scaling(resolver, role)
    yield from ref_beside_actor(resolver)
    yield from critic_beside_actor(resolver)
    yield from uncapped_attention(resolver)
    yield from ignored_truncation(resolver)


def remedy(resolver: DtypeResolver, role: str, patch: str, dtype: Any) -> str:
    """Return what makes a hop of a role follow its dtype: the patch or, on a patched tree, the key of the role."""
    return f"{ROLES[role]}.dtype={dtype}" if resolver.tree.precision else f"{patch}: {resolver.tree.apply_command}"


def ignored_dtypes(resolver: DtypeResolver, role: str) -> Iterator[Finding]:
    """Yield the keys that request what a role computes in, where it computes in something else."""
    name, requested = resolver.tree.name, resolver.requested_dtypes(role)
    if role == "reward_model" and (server_key := resolver.reward_server_key()):
        dtype = resolver.effective_dtype("reward_model.compute")
        for key, value in requested.items():
            effect = f"is ignored by {name}: a server scores in {dtype}"
            yield Finding(key, value, effect, f"{server_key}={value}", applies=False)
        return
    compute = resolver.effective_dtype(f"{role}.compute")
    autocast = resolver.effective_dtype(f"{role}.autocast") if role != "reward_model" else compute
    if compute == UNKNOWN or (role == "ref" and resolver.ref_in_actor):
        return
    rule = rule_for(f"{role}.compute", resolver.implementation(role), resolver.tree.table)
    for key, value in requested.items():
        dtype = next((dtype for dtype, spellings in SPELLINGS.items() if value in spellings), None)
        if value is None or (dtype is not None and dtype in (compute, autocast)):
            continue
        mend = remedy(resolver, role, rule.patch or dtype_rules.COMPUTE, value)
        if key == mend.partition("=")[0]:
            mend = f"{resolver.engine_node(role)}.dtype={value}"
        if not resolver.tree.precision and not resolver.legacy and resolver.implementation(role) == "engine" and dtype:
            mend += f"; or +{resolver.engine_node(role)}.mixed_precision.param_dtype={value}"
        yield Finding(key, value, f"is ignored by {name}: {WORK[role]} in {compute}", mend, applies=False)


def split_dtypes(resolver: DtypeResolver, role: str) -> Iterator[Finding]:
    """Yield FSDP and autocast in different dtypes."""
    if role == "reward_model" or not resolver.on_fsdp(role):
        return
    compute, autocast = (resolver.effective_dtype(f"{role}.{what}") for what in ("compute", "autocast"))
    if UNKNOWN not in (compute, autocast) and compute != autocast:
        param_dtype = f"{resolver.engine_node(role)}.mixed_precision.param_dtype"
        key, value = list((resolver.requested_dtypes(role) or {param_dtype: None}).items())[-1]
        yield Finding(
            key,
            value,
            f"reaches only one half of {resolver.tree.name}: the {role}'s weights are cast to {compute} and its "
            f"autocast computes in {autocast}",
            remedy(resolver, role, dtype_rules.COMPUTE, compute),
            applies=False,
        )


def low_masters(resolver: DtypeResolver, role: str) -> Iterator[Finding]:
    """Yield masters or gradient reduction of a trained role in less than fp32."""
    if role in ("ref", "reward_model") or not resolver.on_fsdp(role):
        return
    node = resolver.engine_node(role)
    master, reduce = (resolver.effective_dtype(f"{role}.{what}") for what in ("master", "reduce"))
    if master in SIXTEEN_BITS:
        key = f"{node}.model_dtype"
        mend = f"{key}=fp32"
        if resolver.trains_adapters(role):  # which the patch keeps in fp32
            mend = remedy(resolver, role, dtype_rules.LORA, resolver.effective_dtype(f"{role}.compute"))
        yield Finding(key, resolver.config.get(key), MASTERS[master], mend)
    if reduce in SIXTEEN_BITS:
        key = f"{node}.mixed_precision.reduce_dtype"
        effect = f"sums the {role}'s gradients over the ranks in {reduce}"
        effect += ", where scaled ones overflow sooner" if reduce == "float16" else ", with 8 bits of mantissa"
        yield Finding(key, resolver.config.get(key), effect, f"{key}=fp32")


def loss_scaling(resolver: DtypeResolver, role: str) -> Iterator[Finding]:
    """Yield fp16 without a loss scaler, settings that nothing reads, a scaler that is neither saved nor reported."""
    name, mend = resolver.tree.name, remedy(resolver, role, dtype_rules.SCALER, "float16")
    scaler, node = resolver.scaler(role), resolver.engine_node(role)
    for key in sorted(key for key in resolver.config.user_keys if key.startswith(f"{node}.grad_scaler")):
        if scaler is None or not scaler["saved"]:
            why = "the loss is not scaled" if scaler is None else "its scaler's settings are fixed"
            value = select(resolver.config.values, key)
            yield Finding(key, value, f"is ignored by {name}: {why}", mend, applies=False)
    dtypes = [resolver.effective_dtype(f"{role}.{what}") for what in ("compute", "autocast")]
    if "float16" in dtypes and scaler is None:
        key, value = next(iter(resolver.requested_dtypes(role).items()), (f"{node}.dtype", "float16"))
        effect = f"puts the {role} into fp16 without a loss scaler: small gradients vanish, no overflow is skipped"
        yield Finding(key, value, effect, mend)
    elif scaler is not None and not scaler["saved"]:
        yield Finding(
            f"{node}.grad_scaler",
            None,
            f"is not a key of {name}, which scales the {role}'s loss by fixed settings and neither saves the scale nor "
            "reports it or a skipped step",
            f"{dtype_rules.SCALER}, {dtype_rules.SAVED}, {dtype_rules.COUNTED}: {resolver.tree.apply_command}",
        )


def ref_beside_actor(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield a ref that computes in another dtype than the actor."""
    if not resolver.uses("ref"):
        return
    actor, ref = (resolver.effective_dtype(f"{role}.compute") for role in ("actor", "ref"))
    if UNKNOWN not in (actor, ref) and actor != ref:
        requested = resolver.requested_dtypes("ref") or resolver.requested_dtypes("actor")
        role_dtype, engine_dtype, param_dtype = resolver.dtype_keys("ref")
        key, value = next(iter(requested.items()), (engine_dtype, ref))
        mend = f"{role_dtype}={actor}" if resolver.tree.precision else f"+{param_dtype}={actor}"
        effect = f"leaves the actor in {actor} beside a ref in {ref}: their KL is not that of the policies"
        yield Finding(key, value, effect, mend)


def critic_beside_actor(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield an actor's dtype that does not reach the critic, where none was requested for the critic."""
    if not resolver.uses("critic") or resolver.requested_dtypes("critic"):
        return
    actor, critic = (resolver.effective_dtype(f"{role}.compute") for role in ("actor", "critic"))
    if UNKNOWN in (actor, critic) or actor == critic:
        return
    for key, value in resolver.requested_dtypes("actor").items():
        if value is not None and actor in full_names([value]):
            rule = rule_for("critic.compute", resolver.implementation("critic"), resolver.tree.table)
            mend = f"{resolver.engine_node('critic')}.dtype={value}"
            if rule.patch or resolver.tree.precision:
                mend = remedy(resolver, "critic", rule.patch, value)
            yield Finding(key, value, f"does not reach the critic, which trains in {critic}", mend)


def uncapped_attention(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield an attention that leaves out the cap of the model's attention logits."""
    attention = resolver.config.get(ATTENTION)
    if effect := lost_softcap(str(resolver.config.get(f"{MODEL}.path")), attention):
        yield Finding(ATTENTION, attention, effect, f"{ATTENTION}=eager")


def ignored_truncation(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield a request for prompts that are refused or cut elsewhere, which verl's agent loop cuts at the left."""
    get, value = resolver.config.get, resolver.config.get(TRUNCATION)
    loop = resolver.tree.root / "verl/experimental/agent_loop/agent_loop.py"
    if (
        TRUNCATION not in resolver.config.user_keys
        or not loop.exists()
        or "_cap_text_prompt_length" not in loop.read_text()
    ):
        return
    if cuts_unasked(value, get("data.filter_overlong_prompts")):
        yield Finding(TRUNCATION, value, IGNORED, ways_to_fit(), applies=False)


def export_findings(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield an export that rounds the weights of a model trained in fp16."""
    compute, export = resolver.effective_dtype("actor.compute"), resolver.effective_dtype("hf_export")
    if compute == "float16" and export == "bfloat16":
        effect = f"of {resolver.tree.name} makes {export} of a model trained in {compute}: each weight loses three bits"
        yield Finding("hf_export", None, effect, f"{dtype_rules.EXPORT}: {resolver.tree.apply_command}")
