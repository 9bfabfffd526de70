"""Predict the error with which a verl would refuse a configuration, and suggest a correction."""

import ast
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from verl_precision.doctor import dtype_rules
from verl_precision.doctor.config import select
from verl_precision.doctor.dtype_rules import rule_for
from verl_precision.doctor.finding import Finding
from verl_precision.doctor.lora_findings import refused_rank
from verl_precision.doctor.megatron_findings import refused_optimizer
from verl_precision.doctor.metric_findings import refused_frequency
from verl_precision.doctor.resolver import ROLES, ROLLOUT, DtypeResolver, Unreadable
from verl_precision.doctor.tree import Tree

# The ends of keys that some verl does not have, and which patch brings them.
PATCHED_KEYS = {
    r"\.grad_scaler(\.\w+)?": dtype_rules.SCALER,
    r"\.keep_fp32_modules": dtype_rules.KEEP,
    r"\.report_dtypes": dtype_rules.REPORT,
    r"(_ref\.(actor|ref)|critic|reward_model)(\.model)?(\.fsdp_config|\.fsdp|\.megatron)?\.dtype": dtype_rules.KEYS,
}
SERVERS = f"{ROLLOUT}.name=vllm, sglang or trtllm"
LEGACY_CRITIC, ENGINE_CRITIC = "critic.model.fsdp_config.", "critic.fsdp."


def refusal(resolver: DtypeResolver) -> str | None:
    """Return the line with which the driver or the first worker would refuse the configuration; None without one."""
    patched = resolver.tree.precision
    try:
        if patched and resolver.legacy:  # its driver checks before it makes dataclasses
            patched.check_workers(resolver.config.values)
        if line := unknown_field(resolver) or refused_rank(resolver) or refused_frequency(resolver):
            return line
        if patched and not resolver.legacy:
            check_engines(resolver)
        for role in ROLES:
            if resolver.uses(role):
                for what in ("master", "compute", "autocast", "reduce"):
                    if rule_for(f"{role}.{what}", resolver.implementation(role), resolver.tree.table):
                        resolver.resolve(f"{role}.{what}")
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    except Unreadable as error:
        return str(error)
    return unrunnable(resolver)


def unrunnable(resolver: DtypeResolver) -> str | None:
    """Return the line with which upstream's own checks end a job that its configuration lets start."""
    get, release = resolver.config.get, resolver.release
    if resolver.server == "hf" and not release.has("hf_rollout"):
        return f"AssertionError: Rollout hf with mode {get(f'{ROLLOUT}.mode', 'sync')} not found"
    for role in ("actor", "critic"):
        if not resolver.uses(role) or resolver.implementation(role) != "megatron":
            continue
        if line := refused_optimizer(resolver, role):
            return line
        if resolver.legacy:
            bridged = get(f"{resolver.engine_node(role)}.use_mbridge")
            if resolver.effective_dtype(f"{role}.compute") == "float16" and not bridged:
                return "AssertionError: fp16 mode requires use_mbridge to be True"
    if line := refused_quantization(resolver):
        return line
    engine_critic = resolver.uses("critic") and resolver.implementation("critic") == "engine"
    if engine_critic and release.has("engine_critic_fails"):
        return "AttributeError: 'FSDPCriticModelCfg' object has no attribute 'hf_config'"
    return None


def unknown_strategies(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield the strategies that no engine of this verl has."""
    files = sorted((resolver.tree.root / "verl/workers/engine").glob("*/*.py"))
    quoted = [re.findall(r"EngineRegistry\.register\(.*backend=(\[.*?\]|\".*?\")", file.read_text()) for file in files]
    known = {"fsdp", "fsdp2", "megatron", *re.findall(r'"(\w+)"', " ".join(sum(quoted, [])))}
    for role in ROLES:
        key = f"{ROLES[role]}.strategy"
        if resolver.uses(role) and (value := resolver.config.get(key, "fsdp")) not in known:
            choices = f"{key}=fsdp or fsdp2; of another model_engine: {', '.join(sorted(known - {'fsdp', 'fsdp2'}))}"
            yield Finding(key, value, f"is no strategy of {resolver.tree.name}", choices)


def missing_rollout(resolver: DtypeResolver, line: str) -> Iterator[Finding]:
    """Yield the rollout that this verl does not have, where ``line`` refuses it."""
    if f"Rollout {resolver.server} " in line:
        yield Finding(f"{ROLLOUT}.name", resolver.server, f"is no rollout of {resolver.tree.name}", SERVERS)


def refused_quantization(resolver: DtypeResolver) -> str | None:
    """Return the line with which the release's server refuses to quantize, read from its file; None without one."""
    get, tree = resolver.config.get, resolver.tree
    rule = rule_for("rollout.weights", f"{resolver.server} async", tree.table)
    value = get(f"{ROLLOUT}.quantization")
    if rule is None or not resolver.served or not (tree.root / "verl" / rule.path).exists():
        return None
    if resolver.trained_quantization:
        path = get(f"{ROLLOUT}.qat.quantization_config_path")
        return None if path else "ValueError: quantization_config_path is required when QAT is enabled"
    source = (tree.root / "verl" / rule.path).read_text()
    listed = re.search(r"_SUPPORTED_QUANTIZATION = (\[.*\])", source)
    known = ast.literal_eval(listed[1]) if listed else re.findall(r"Currently only support (\w+) quantization", source)
    if value is None or not known or value in known:
        return None
    return f"ValueError: Currently only support {known if listed else known[0]} quantization, got: {value}"


def check_engines(resolver: DtypeResolver) -> None:
    """Check the configuration as the driver of a patched tree with the model engine does, by its own module, in order.

    Raises:
        ValueError, TypeError: the driver's refusal.
    """
    module, config = resolver.tree.precision, resolver.config
    check_role(resolver, "actor")
    if module.run_requests_precision(config.values):
        module.check_rollout_dtype(config.get(f"{ROLLOUT}.dtype"))
        if resolver.uses("ref"):
            resolver.engine_config("ref")
    if resolver.uses("critic"):
        check_role(resolver, "critic")


def check_role(resolver: DtypeResolver, role: str) -> None:
    """Check a trained role's engine and its master weights."""
    made = SimpleNamespace(strategy=resolver.config.get(f"{ROLES[role]}.strategy"), engine=resolver.engine_config(role))
    resolver.tree.precision.check_master_dtype(ROLES[role], made, int(resolver.trains_adapters(role)))


def unknown_field(resolver: DtypeResolver) -> str | None:
    """Return the error of a dataclass of verl's on a key that it does not have; the yaml alone takes any with ``+``."""
    classes = config_classes(resolver.tree.root)
    values = resolver.config.values
    for role, path in {**ROLES, "rollout": ROLLOUT}.items():
        if role != "rollout" and not resolver.uses(role):
            continue
        below = [each for each in resolver.config.user_keys if each.startswith(f"{path}.")]
        for key in sorted(below, key=lambda each: (-each.count("."), each)):  # Hydra makes the inner ones first
            parts = key.split(".")
            nodes = ((end, select(values, ".".join(parts[:end]))) for end in range(len(parts) - 1, path.count("."), -1))
            for end, node in nodes:
                target = node.get("_target_") if isinstance(node, Mapping) else None
                if target is None:
                    continue
                name = target.rpartition(".")[2]
                fields = class_fields(name, classes) if target.startswith("verl.") else None
                # The ref's worker renames its log_prob_ keys, and a legacy one makes no dataclass of the role's own.
                own_ref = path == ROLES["ref"] == ".".join(parts[:end])
                if own_ref and (resolver.legacy or "log_prob_" in parts[end]):
                    break
                if fields is not None and parts[end] not in fields:
                    return f"TypeError: {name}.__init__() got an unexpected keyword argument '{parts[end]}'"
                break
    return None


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
    """Yield the overrides that a refusal is about: which patch brings the key, where it is here, or what is near it.

    Args:
        line: the refusal.
        known: the keys of this verl's configuration, where that did not compose.
    """
    legacy = tree.release.has("legacy_workers")
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        if not any(f"'{part}'" in line for part in (key, *key.split("."))):
            continue
        patch = next((patch for end, patch in PATCHED_KEYS.items() if re.search(f"{end}$", key)), None)
        near = difflib.get_close_matches(key, known, n=1)
        if legacy and key.startswith(ENGINE_CRITIC):
            mend = f"{key.replace(ENGINE_CRITIC, LEGACY_CRITIC, 1)}={value}"
        elif not legacy and key.startswith(LEGACY_CRITIC):
            mend = f"{key.replace(LEGACY_CRITIC, ENGINE_CRITIC, 1)}={value}"
        elif patch and tree.state != "patched" and not (legacy and patch == dtype_rules.KEEP):
            mend = f"{patch}: {tree.apply_command}"
        elif near:
            mend = f"the nearest key is {near[0]}"
        else:
            continue
        yield Finding(key, value, f"is not in {tree.name}", mend)
