"""Predict the error with which a verl would refuse a configuration, and suggest a correction."""

import difflib
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

from verl_precision.doctor import dtype_rules
from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import ROLES, ROLLOUT, DtypeResolver, UnexpectedPrecision
from verl_precision.doctor.rollout_findings import BYPASS, MISMATCH_FREQ, mismatch_freq
from verl_precision.doctor.trainer_findings import lora_ranks
from verl_precision.doctor.tree import Tree

# The ends of keys that some verl does not have, and the patch that adds them.
PATCHED_KEYS = {
    r"\.grad_scaler(\.\w+)?": dtype_rules.SCALER,
    r"\.keep_fp32_modules": dtype_rules.KEEP,
    r"\.report_dtypes": dtype_rules.REPORT,
    r"(_ref\.(actor|ref)|critic|reward_model)(\.model)?(\.fsdp_config|\.fsdp|\.megatron)?\.dtype": dtype_rules.KEYS,
}
LEGACY_CRITIC, ENGINE_CRITIC = "critic.model.fsdp_config.", "critic.fsdp."


def refusal(job: DtypeResolver) -> str | None:
    """Return the line with which the driver or the first worker would refuse the configuration; None without one.

    The driver refuses a field that a dataclass of verl lacks, too, at once and by its name.
    """
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
    for key, rank in lora_ranks(job).items():
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
    """Check the configuration as the driver of a patched tree with the model engine does, by its own module, in order.

    Raises:
        ValueError, TypeError: the driver's refusal.
    """
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


def unknown_keys(tree: Tree, line: str, overrides: Sequence[str], known: Sequence[str]) -> Iterator[Finding]:
    """Yield the overrides that a refusal is about: which patch adds the key, or which of the known ones is near it."""
    legacy = tree.release.has("legacy_workers")
    absent, present = (ENGINE_CRITIC, LEGACY_CRITIC) if legacy else (LEGACY_CRITIC, ENGINE_CRITIC)
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
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
