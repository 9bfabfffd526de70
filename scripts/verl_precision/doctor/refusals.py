"""Predict the error with which a verl would refuse a configuration, and suggest a correction."""

import ast
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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
    """Return the line with which the driver or the first worker would refuse the configuration; None without one."""
    try:
        return next(errors(job), None)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    except UnexpectedPrecision as error:
        return f"RuntimeError: {error}"


def errors(job: DtypeResolver) -> Iterator[str]:
    """Yield the errors of verl's own checks, in their order.

    Raises:
        ValueError, TypeError: the error of a patched tree's module.
        UnexpectedPrecision: that of a worker on the value of a dtype key.
    """
    get, patched = job.get, job.tree.precision
    if patched and job.legacy:  # its driver checks before it makes dataclasses
        patched.check_workers(job.config.values)
    yield from unknown_fields(job)
    for key, rank in lora_ranks(job).items():
        if not isinstance(rank, int):
            yield f"TypeError: {key}={rank} must be a whole number, 0 to train without adapters"
    freq = mismatch_freq(job)
    if not isinstance(freq, int) and get(BYPASS):
        yield f"ValueError: {MISMATCH_FREQ}={freq} must be a whole number of steps, or -1 to measure none"
    if patched and not job.legacy:
        check_engines(job)
    for role in job.used(*ROLES):
        for what in ("master", "compute", "autocast", "reduce"):
            if job.rule(f"{role}.{what}", job.implementation(role)):
                job.resolve(f"{role}.{what}")
    if job.server == "hf" and not job.release.has("hf_rollout"):
        yield f"AssertionError: Rollout hf with mode {get(f'{ROLLOUT}.mode', 'sync')} not found"
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


def unknown_strategies(job: DtypeResolver) -> Iterator[Finding]:
    """Yield the strategies that no engine of this verl has."""
    files = sorted((job.tree.root / "verl/workers/engine").glob("*/*.py"))
    quoted = [re.findall(r"EngineRegistry\.register\(.*backend=(\[.*?\]|\".*?\")", file.read_text()) for file in files]
    known = {"fsdp", "fsdp2", "megatron", *re.findall(r'"(\w+)"', " ".join(sum(quoted, [])))}
    for role in job.used(*ROLES):
        key = f"{ROLES[role]}.strategy"
        if (value := job.get(key, "fsdp")) not in known:
            choices = f"{key}=fsdp or fsdp2; of another model_engine: {', '.join(sorted(known - {'fsdp', 'fsdp2'}))}"
            yield Finding(key, value, f"is no strategy of {job.tree.name}", choices)


def missing_rollout(job: DtypeResolver, line: str) -> Iterator[Finding]:
    """Yield the rollout that this verl does not have, where ``line`` refuses it."""
    if f"Rollout {job.server} " in line:
        fix = f"{ROLLOUT}.name=vllm, sglang or trtllm"
        yield Finding(f"{ROLLOUT}.name", job.server, f"is no rollout of {job.tree.name}", fix)


def unknown_fields(job: DtypeResolver) -> Iterator[str]:
    """Yield the errors of verl's dataclasses on keys that they do not have; the yaml files accept any with ``+``."""
    classes = config_classes(job.tree.root)
    for path in [*(ROLES[role] for role in job.used(*ROLES)), ROLLOUT]:
        below = [each for each in job.config.user_keys if each.startswith(f"{path}.")]
        for key in sorted(below, key=lambda each: (-each.count("."), each)):  # Hydra makes the inner ones first
            parts = key.split(".")
            nodes = [".".join(parts[:end]) for end in range(len(parts) - 1, path.count("."), -1)]
            node = next((node for node in nodes if job.config.has(f"{node}._target_")), None)
            if node is None:
                continue
            target, field = job.get(f"{node}._target_"), key.removeprefix(f"{node}.").partition(".")[0]
            # The ref's worker renames its log_prob_ keys, and a legacy one makes no dataclass of its role.
            if node == ROLES["ref"] and (job.legacy or "log_prob_" in field):
                continue
            name = target.rpartition(".")[2]
            fields = class_fields(name, classes) if target.startswith("verl.") else None
            if fields is not None and field not in fields:
                yield f"TypeError: {name}.__init__() got an unexpected keyword argument '{field}'"


def config_classes(root: Path) -> dict[str, ast.ClassDef]:
    """Return the classes of the tree's configs by name, parsed and not imported."""
    classes = {}
    for folder in ("workers/config", "trainer/config", "utils/profiler"):
        for file in sorted((root / "verl" / folder).glob("*.py")):
            classes |= {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}
    return classes


def class_fields(name: str, classes: Mapping[str, ast.ClassDef]) -> set[str] | None:
    """Return the fields of a dataclass and of its bases; None where one of them is not among ``classes``."""
    if name == "BaseConfig":  # verl's, which has none
        return set()
    if name not in classes:
        return None
    fields = {node.target.id for node in classes[name].body if isinstance(node, ast.AnnAssign)}
    for base in classes[name].bases:
        inherited = class_fields(base.id, classes) if isinstance(base, ast.Name) else None
        if inherited is None:
            return None
        fields |= inherited
    return fields


def unknown_keys(tree: Tree, line: str, overrides: Sequence[str], known: Sequence[str]) -> Iterator[Finding]:
    """Yield the overrides that a refusal is about: which patch adds the key, where it is here, or what is near it.

    Args:
        line: the refusal.
        known: the keys of this verl's configuration, where that did not compose.
    """
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
