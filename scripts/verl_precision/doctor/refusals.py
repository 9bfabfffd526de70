"""Predict where a job ends: by verl's own checks, on its batch sizes, or on its model; and suggest a correction.

Sources of verl, vLLM and transformers are read, nothing is imported.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_precision.doctor import dtype_rules
from verl_precision.doctor.findings import BYPASS, MISMATCH_FREQ, Finding, mismatch_freq
from verl_precision.doctor.resolver import (
    MODEL,
    ROLES,
    ROLLOUT,
    DtypeResolver,
    UnexpectedPrecision,
    names_head,
    server_dtype,
)
from verl_precision.doctor.tree import Tree
from verl_precision.facts.models import config_file, read_text_config
from verl_precision.facts.packages import package_folder
from verl_precision.facts.vllm_float16 import Float16Support, float16_support, ignores_head_dtype, version, ways_out
from verl_precision.patch.status import apply_command
from verl_precision.paths import CONFIGS
from verl_precision.words import options

# The ends of keys that some verl does not have, and the patch that adds them.
PATCHED_KEYS = {
    r"\.grad_scaler(\.\w+)?": dtype_rules.SCALER,
    r"\.keep_fp32_modules": dtype_rules.KEEP,
    r"\.report_dtypes": dtype_rules.REPORT,
    r"(_ref\.(actor|ref)|critic|reward_model)(\.model)?(\.fsdp_config|\.fsdp|\.megatron)?\.dtype": dtype_rules.KEYS,
}
GROUPS = tuple(folder.name for folder in CONFIGS.iterdir() if options(folder.name))  # of this repository, for `+`
CRITICS = ("critic.model.fsdp_config.", "critic.fsdp.")  # of the legacy workers, of the model engine
UNEVEN = "verl ends with `data size must be divisible by force_group_size * micro_batch_size_per_gpu`"
DYNAMIC = "log_prob_use_dynamic_bsz"
KV_HEADS = "num_key_value_heads"
BASE_ONLY = "per_tensor_param, _ = self.actor.engine.get_per_tensor_param()"  # sent by any engine but `naive`
UNSTACKED = "get_unstacked_mapper()"  # verl's call of vLLM 0.25 to 0.28, which 0.29 renamed
OTHER = "another model: docs/reference/limits.md#upstreams-own-limits"


# --- verl's own checks ------------------------------------------------------------------------------------------------


def refusal(job: DtypeResolver) -> str | None:
    """Return the line with which the driver or the first worker would refuse the configuration; None without one."""
    try:
        return next(errors(job), None)
    except (ValueError, TypeError) as error:  # of the patched tree's module
        return f"{type(error).__name__}: {error}"
    except UnexpectedPrecision as error:  # of a worker
        return f"RuntimeError: {error}"


def errors(job: DtypeResolver) -> Iterator[str]:
    """Yield the errors of verl's own checks, in their order, or raise the first one."""
    patched = job.tree.precision
    if patched and job.legacy:
        patched.check_workers(job.config.values)
    for key in (f"{MODEL}.lora_rank", f"{MODEL}.lora.rank", *(["critic.model.lora_rank"] * job.uses("critic"))):
        node, _, name = key.rpartition(".")
        rank = job.get(node, {}).get(name, 0)
        if not isinstance(rank, int):
            yield f"TypeError: {key}={rank} must be a whole number, 0 to train without adapters"
    freq = mismatch_freq(job)
    if not isinstance(freq, int) and job.get(BYPASS):
        yield f"ValueError: {MISMATCH_FREQ}={freq} must be a whole number of steps, or -1 to measure none"
    if patched and not job.legacy:
        check_engines(job)
    for role in job.used(*ROLES):
        for what in ("master", "compute", "autocast", "reduce"):
            if job.rule(f"{role}.{what}", job.implementation(role)):
                job.resolve(f"{role}.{what}")
    engine_critic = job.uses("critic") and job.implementation("critic") == "engine"
    if engine_critic and job.release.has("engine_critic_fails"):
        yield "AttributeError: 'FSDPCriticModelCfg' object has no attribute 'hf_config'"


def check_engines(job: DtypeResolver) -> None:
    """Raise the error of the driver of a patched tree with the model engine, by the tree's own module, in its order."""
    module = job.tree.precision

    def check(role: str) -> None:
        made = SimpleNamespace(strategy=job.get(f"{ROLES[role]}.strategy"), engine=job.engine_config(role))
        module.check_master_dtype(ROLES[role], made, int(job.trains_adapters(role)))

    check("actor")
    if module.run_requests_precision(job.config.values):
        module.check_rollout_dtype(job.get(f"{ROLLOUT}.dtype"))
        if job.uses("ref"):
            job.engine_config("ref")
    if job.uses("critic"):
        check("critic")
    kept = job.get(f"{ROLLOUT}.keep_fp32_modules")
    if job.server == "vllm" and names_head(kept) and ignores_head_dtype(job.tree.root):
        module.args_with_fp32_modules({}, kept, version(package_folder("vllm", job.tree.root)))


def unavailable(job: DtypeResolver) -> Iterator[Finding]:
    """Yield the strategies that no engine of this verl has, and the hf rollout where the release lacks it."""
    files = sorted((job.tree.root / "verl/workers/engine").glob("*/*.py"))
    quoted = [re.findall(r"EngineRegistry\.register\(.*backend=(\[.*?\]|\".*?\")", file.read_text()) for file in files]
    known = {"fsdp", "fsdp2", "megatron", *re.findall(r'"(\w+)"', " ".join(sum(quoted, [])))}
    for role in job.used(*ROLES):
        if (value := job.strategy(role)) not in known:
            key = f"{ROLES[role]}.strategy"
            choices = f"{key}=fsdp or fsdp2; of another model_engine: {', '.join(sorted(known - {'fsdp', 'fsdp2'}))}"
            yield Finding(key, value, f"is no strategy of {job.tree.name}", choices)
    if job.server == "hf" and not job.release.has("hf_rollout"):
        key = f"{ROLLOUT}.name"
        yield Finding(key, "hf", f"is no rollout of {job.tree.name}", f"{key}=vllm, sglang or trtllm")


def unsent_adapters(job: DtypeResolver) -> Iterator[Finding]:
    """Yield unmerged LoRA where a checkpoint engine sends only the base, by names that vLLM's model does not have."""
    merge, worker = f"{MODEL}.lora.merge", job.tree.root / "verl/workers/engine_workers.py"
    separate = job.get("trainer.use_v1") and job.get("trainer.v1.trainer_mode") == "separate_async"
    if separate and job.trains_adapters("actor") and not job.get(merge) and BASE_ONLY in worker.read_text():
        effect = f"fails in separate_async: {job.tree.name} sends the base only, under names of an adapted model"
        yield Finding(merge, False, effect, f"{merge}=true")


def renamed_mapper(job: DtypeResolver) -> Iterator[Finding]:
    """Yield unmerged LoRA where verl calls a method that its vLLM has renamed."""
    merge, loader = f"{MODEL}.lora.merge", job.tree.root / "verl/utils/vllm/utils.py"
    if job.server != "vllm" or not job.trains_adapters("actor") or job.get(merge) or not loader.exists():
        return
    if (vllm := package_folder("vllm", job.tree.root)) is None:
        return
    table = vllm / "model_executor/models/utils.py"
    if table.exists() and "def get_rename_mapper" in table.read_text() and UNSTACKED in loader.read_text():
        effect = f"fails with vLLM {version(vllm)}: {job.tree.name} calls a method that vLLM 0.29 renamed"
        patches = apply_command(job.tree.root, "precision and fixes")
        yield Finding(merge, False, effect, f"{merge}=true, vLLM before 0.29, or {patches}")


def unknown_keys(tree: Tree, line: str, overrides: Sequence[str], known: Sequence[str]) -> Iterator[Finding]:
    """Yield the overrides that a refusal is about: which patch adds the key, or which of the known ones is near it.

    A group of this repository without its ``+`` is one of them, and so is a regime that there is not.
    """
    legacy = tree.release.has("legacy_workers")
    present, absent = CRITICS if legacy else CRITICS[::-1]
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        if key in GROUPS and any(f"'{part}'" in line for part in (key, f"{key}/{value}")):
            yield Finding(key, value, *misused_group(tree, key, value))
            continue
        if not any(f"'{part}'" in line for part in (key, *key.split("."))):
            continue
        patch = next((patch for end, patch in PATCHED_KEYS.items() if re.search(f"{end}$", key)), None)
        near = difflib.get_close_matches(key, known, n=1)
        if key.startswith(absent):
            fix = f"{key.replace(absent, present, 1)}={value}"
        elif patch and tree.state != "patched" and not (legacy and patch == dtype_rules.KEEP):
            fix = f"{patch}: {tree.apply_command}"
        elif near:
            fix = f"the nearest key is {near[0]}"
        else:
            continue
        yield Finding(key, value, f"is not in {tree.name}", fix)


def misused_group(tree: Tree, group: str, value: str) -> tuple[str, str]:
    """Return effect and fix of an override with a group that ``+`` must add, or with a name that the group lacks."""
    names = options(group)
    effect = f"is not in the defaults of {tree.name}, so that it needs a +"
    fix = f"+{group}={value}"
    if value not in names:
        kind = "regime" if group == "precision" else f"name in configs/{group}"
        effect, fix = f"is no {kind}", f"+{group}={', '.join(names[:-1])} or {names[-1]}"
    if group == "precision" and not tree.precision:
        fix += f"; {dtype_rules.KEYS} brings the group: {tree.apply_command}"
    return effect, fix


# --- batch sizes ------------------------------------------------------------------------------------------------------


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


# --- models -----------------------------------------------------------------------------------------------------------


def float16_servers(job: DtypeResolver) -> Iterator[tuple[str, str, Float16Support]]:
    """Yield the keys of dtype and model of each vLLM that the job starts in float16, and whether it runs that model."""
    keys = []
    if job.server == "vllm" and job.effective_dtype("rollout.compute") == "float16":
        keys.append((job.rollout_dtype_key, f"{MODEL}.path"))
    key = job.reward_server_key() if job.uses("reward_model") else None
    if key and job.get(key.replace(".dtype", ".name")) == "vllm" and server_dtype(job.get(key)) == "float16":
        model = "model.path" if key.startswith("reward_model.") else "model_path"
        keys.append((key, key.replace("rollout.dtype", model)))
    for dtype_key, model_key in keys:
        yield dtype_key, model_key, float16_support(str(job.get(model_key)), job.tree.root)


def float16_refusals(job: DtypeResolver) -> Iterator[Finding]:
    """Yield the dtypes of vLLM servers that refuse their model in float16."""
    for key, _, support in float16_servers(job):
        if support.supported is False:
            yield Finding(key, job.get(key), f"ends the job at its start: {support.reason}", ways_out(key=key))


def float16_doubts(job: DtypeResolver) -> Iterator[Finding]:
    """Yield the models that the user set for a vLLM server in float16, where it is not known whether that runs them."""
    for _, key, support in float16_servers(job):
        if support.supported is None and key in job.config.user_keys:
            effect = f"may be a model that vLLM refuses in float16; it is not known: {support.reason}"
            fix = "make doctor VERL=SITE-PACKAGES of an environment with the job's vLLM, and the model's folder"
            yield Finding(key, job.get(key), effect, fix)


def unsupported_models(job: DtypeResolver) -> Iterator[Finding]:
    """Yield the model where the actor's worker or the rollout server would end on it, if its config.json is here."""
    model, site, on_fsdp = str(job.get(f"{MODEL}.path")), job.tree.root, job.on_fsdp("actor")
    if (file := config_file(model)) is None:
        return
    config = read_text_config(file)
    reasons = [missing_kv_heads(config, site)] if on_fsdp else []
    if on_fsdp and job.server == "vllm" and (vllm := package_folder("vllm", site)):  # Megatron sends vLLM's names
        reasons.append(mixtral_weights(config, vllm, site))
    for reason in filter(None, reasons):
        yield Finding(f"{MODEL}.path", model, reason, OTHER)


def missing_kv_heads(config: Mapping[str, Any], site: Path) -> str | None:
    """Return why verl's ``apply_monkey_patch`` ends on a model: neither its config nor its class has KV_HEADS."""
    kind = str(config.get("model_type"))
    package = package_folder("transformers", site)
    source = package / f"models/{kind}/configuration_{kind}.py" if package else None
    if KV_HEADS in config or source is None or not source.exists() or KV_HEADS in source.read_text():
        return None
    return f"is a {kind} model, whose config has no {KV_HEADS}: verl's apply_monkey_patch ends with an AttributeError"


def mixtral_weights(config: Mapping[str, Any], vllm: Path, site: Path) -> str | None:
    """Return why vLLM cannot load a Mixtral's weights: its loader knows no ``mlp.experts``, transformers 5's name."""
    source, package = vllm / "model_executor/models/mixtral.py", package_folder("transformers", site)
    if config.get("model_type") != "mixtral" or package is None or not source.exists():
        return None
    release = re.search(r'^__version__ = "(\d+)([^"]*)"', (package / "__init__.py").read_text(), re.M)
    if release is None or int(release[1]) < 5 or "gate_up_proj" in source.read_text():
        return None
    return (
        f"is a mixtral model, whose experts transformers {release[1]}{release[2]} names mlp.experts: "
        f"vLLM {version(vllm)} cannot load the weights that verl sends"
    )


# What ends a job that verl's own checks let start, in the order in which it would meet them.
ENDINGS = (unsent_adapters, renamed_mapper, unsupported_models, uneven_batches, float16_refusals)
