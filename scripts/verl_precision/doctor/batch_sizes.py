"""Predict where verl ends because its workers cannot split a batch evenly: after the first generation."""

import math
from collections.abc import Iterator

from verl_precision.doctor.finding import Finding
from verl_precision.doctor.metric_findings import BYPASS, mismatch_freq
from verl_precision.doctor.resolver import ROLES, ROLLOUT, DtypeResolver

UNEVEN = "verl ends with `data size must be divisible by force_group_size * micro_batch_size_per_gpu`"
DYNAMIC = "log_prob_use_dynamic_bsz"


def sizes_of_batches(resolver: DtypeResolver, roles: list[str]) -> Iterator[tuple[str, int]]:
    """Yield each size by which a batch is split or multiplied, by key, with the smallest that verl accepts."""
    yield "data.train_batch_size", 0  # the asynchronous trainers have no batch of prompts
    for key in ("trainer.nnodes", "trainer.n_gpus_per_node", f"{ROLLOUT}.n"):
        yield key, 1
    for role in roles:
        keys = (ROLES[role], resolver.engine_node(role))
        sequences = [f"{key}.ulysses_sequence_parallel_size" for key in keys]
        yield from ((key, 1) for key in sequences if resolver.config.has(key))
        if role != "ref":
            yield f"{ROLES[role]}.ppo_mini_batch_size", 1
    micro = (f"{ROLES['actor']}.ppo", f"{ROLLOUT}.log_prob", f"{ROLES['ref']}.log_prob")
    keys = [f"{each}_micro_batch_size_per_gpu" for each in micro]
    yield from ((key, 1) for key in keys if resolver.config.has(key))


def no_sizes(resolver: DtypeResolver, roles: list[str]) -> Iterator[Finding]:
    """Yield the sizes that are no whole numbers, or too small."""
    for key, least in sizes_of_batches(resolver, roles):
        value = resolver.config.get(key)
        if type(value) is not int or value < least:
            yield Finding(key, value, f"is no whole number of at least {least}", f"{key}={max(least, 1)} or more")


def workers(resolver: DtypeResolver, role: str) -> int:
    """Return the number of workers among which verl's FSDP engine splits a batch of the role."""
    get = resolver.config.get
    sequence = get(f"{resolver.engine_node(role)}.ulysses_sequence_parallel_size", 1)
    older = get(f"{ROLES[role]}.ulysses_sequence_parallel_size", 1)  # wins where it is set, save for the critic
    sequence = older if older > 1 and role != "critic" else sequence
    return max(1, get("trainer.nnodes") * get("trainer.n_gpus_per_node") // sequence)


def uneven_batches(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield the sizes that do not divide what they split, where all roles run on verl's model engine under FSDP.

    verl scales ``ppo_mini_batch_size``, in prompts, by ``rollout.n``. The workers share that evenly, and each splits
    its share into micro-batches (``train_mini_batch``, ``prepare_micro_batches``). For log-probabilities the v1 trainer
    fills the batch up to whole mini-batches (``_get_required_batch_multiple``). The critic counts
    tokens.
    """
    get, roles = resolver.config.get, [role for role in ("actor", "ref", "critic") if resolver.uses(role)]
    if resolver.legacy or any(resolver.implementation(role) != "engine" for role in roles):
        return
    if wrong := list(no_sizes(resolver, roles)):
        yield from wrong
        return
    actor, ref, answers = ROLES["actor"], ROLES["ref"], get(f"{ROLLOUT}.n")
    dynamic = get(f"{actor}.use_dynamic_bsz", False)
    if get(f"{ROLLOUT}.{DYNAMIC}", False) != dynamic:
        effect = f"differs from {actor}.use_dynamic_bsz={dynamic}: verl's workers end at their start"
        yield Finding(f"{ROLLOUT}.{DYNAMIC}", not dynamic, effect, f"{ROLLOUT}.{DYNAMIC}={dynamic}")
    whole = workers(resolver, "actor")
    for role in (role for role in roles if role != "ref"):
        key, count = f"{ROLES[role]}.ppo_mini_batch_size", workers(resolver, role)
        mini = get(key)
        if mini * answers % count:
            effect = f"times {ROLLOUT}.n={answers} cannot be shared by {count} workers: verl ends at its first update"
            yield Finding(key, mini, effect, f"{key}: a multiple of {count // math.gcd(count, answers)}")
            return
        whole = math.lcm(whole, mini * answers)
    batch = get("data.train_batch_size") * answers
    if get("trainer.use_v1"):
        batch = math.ceil(batch / whole) * whole
    mini = get(f"{actor}.ppo_mini_batch_size") * answers
    sizes = [(f"{actor}.ppo_micro_batch_size_per_gpu", dynamic, "actor", mini)]
    if not get(BYPASS) or mismatch_freq(resolver) > 0:
        sizes.append((f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", dynamic, "actor", batch))
    if resolver.uses("ref") and not resolver.ref_in_actor:
        sizes.append((f"{ref}.log_prob_micro_batch_size_per_gpu", get(f"{ref}.{DYNAMIC}", False), "ref", batch))
    for key, by_tokens, role, split in sizes:
        size, count = get(key), workers(resolver, role)
        share = split // count
        if size is not None and not by_tokens and share % size:
            fits = max(divisor for divisor in range(1, min(size, share) + 1) if share % divisor == 0)
            effect = f"does not divide the {share} answers of each of the {count} workers ({split} in all): {UNEVEN}"
            yield Finding(key, size, effect, f"{key}={fits}, or another divisor of {share}")
