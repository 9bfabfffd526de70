"""Predict where verl ends because its workers cannot split a batch evenly: after the first generation."""

import math
from collections.abc import Iterator

from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import ROLES, ROLLOUT, DtypeResolver
from verl_precision.doctor.rollout_findings import BYPASS, mismatch_freq

UNEVEN = "verl ends with `data size must be divisible by force_group_size * micro_batch_size_per_gpu`"
DYNAMIC = "log_prob_use_dynamic_bsz"


def bad_sizes(job: DtypeResolver, roles: list[str]) -> Iterator[Finding]:
    """Yield the sizes by which a batch is split or multiplied that are no whole numbers, or too small."""
    optional = [f"{node}.log_prob_micro_batch_size_per_gpu" for node in (ROLLOUT, ROLES["ref"])]
    optional.append(f"{ROLES['actor']}.ppo_micro_batch_size_per_gpu")
    for role in roles:
        optional += [f"{node}.ulysses_sequence_parallel_size" for node in (ROLES[role], job.engine_node(role))]
    keys = ["trainer.nnodes", "trainer.n_gpus_per_node", f"{ROLLOUT}.n", *filter(job.config.has, optional)]
    keys += [f"{ROLES[role]}.ppo_mini_batch_size" for role in roles if role != "ref"]
    smallest = {"data.train_batch_size": 0} | dict.fromkeys(keys, 1)  # asynchronous trainers have no batch of prompts
    for key, least in smallest.items():
        value = job.get(key)
        if type(value) is not int or value < least:
            yield Finding(key, value, f"is no whole number of at least {least}", f"{key}={max(least, 1)} or more")


def workers(job: DtypeResolver, role: str) -> int:
    """Return the number of workers among which verl's FSDP engine splits a batch of the role."""
    get = job.get
    sequence = get(f"{job.engine_node(role)}.ulysses_sequence_parallel_size", 1)
    older = get(f"{ROLES[role]}.ulysses_sequence_parallel_size", 1)  # wins where it is set, except for the critic
    sequence = older if older > 1 and role != "critic" else sequence
    return max(1, get("trainer.nnodes") * get("trainer.n_gpus_per_node") // sequence)


def uneven_batches(job: DtypeResolver) -> Iterator[Finding]:
    """Yield the sizes that do not divide what they split, where all roles run on verl's model engine under FSDP.

    verl scales ``ppo_mini_batch_size``, in prompts, by ``rollout.n``. The workers share that evenly, and each splits
    its share into micro-batches (``train_mini_batch``, ``prepare_micro_batches``). For log-probabilities the v1 trainer
    fills the batch up to whole mini-batches (``_get_required_batch_multiple``). The critic counts tokens.
    """
    get, roles = job.get, job.used("actor", "ref", "critic")
    if job.legacy or any(job.implementation(role) != "engine" for role in roles):
        return
    if wrong := list(bad_sizes(job, roles)):
        yield from wrong
        return
    actor, ref, answers = ROLES["actor"], ROLES["ref"], get(f"{ROLLOUT}.n")
    dynamic = get(f"{actor}.use_dynamic_bsz", False)
    if get(f"{ROLLOUT}.{DYNAMIC}", False) != dynamic:
        effect = f"differs from {actor}.use_dynamic_bsz={dynamic}: verl's workers end at their start"
        yield Finding(f"{ROLLOUT}.{DYNAMIC}", not dynamic, effect, f"{ROLLOUT}.{DYNAMIC}={dynamic}")
    whole = workers(job, "actor")
    for role in (role for role in roles if role != "ref"):
        key, count = f"{ROLES[role]}.ppo_mini_batch_size", workers(job, role)
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
    if not get(BYPASS) or mismatch_freq(job) > 0:
        sizes.append((f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", dynamic, "actor", batch))
    if job.uses("ref") and not job.ref_in_actor:
        sizes.append((f"{ref}.log_prob_micro_batch_size_per_gpu", get(f"{ref}.{DYNAMIC}", False), "ref", batch))
    for key, by_tokens, role, split in sizes:
        size, count = get(key), workers(job, role)
        share = split // count
        if size is not None and not by_tokens and share % size:
            fits = max(divisor for divisor in range(1, min(size, share) + 1) if share % divisor == 0)
            effect = f"does not divide the {share} answers of each of the {count} workers ({split} in all): {UNEVEN}"
            yield Finding(key, size, effect, f"{key}={fits}, or another divisor of {share}")
