"""Determinism: which parts of a job ``full_determinism`` reaches, and what it does to the answers of a group."""

import ast
from collections.abc import Iterator
from pathlib import Path

from verl_precision.doctor.finding import Finding
from verl_precision.doctor.resolver import ROLES, ROLLOUT, DtypeResolver
from verl_precision.facts.packages import package_folder
from verl_precision.facts.vllm_float16 import version

KEY = f"{ROLLOUT}.full_determinism"
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"  # the variable by which verl's vLLM server asks for batch-invariant kernels
LEAST_CAPABILITY = (8, 0)  # vLLM's documents; older GPUs get no batch-invariant matrix multiplication, and no error


def deterministic_parts(resolver: DtypeResolver) -> dict[str, bool]:
    """Return, for each model that the job runs, whether ``full_determinism`` is set for it and its code reads it."""
    roles = [role for role in ROLES if role != "reward_model" and resolver.uses(role)]
    parts = {role: is_requested(resolver, role) and is_read(resolver, role) for role in roles}
    return parts | {"rollout": bool(resolver.config.get(KEY)) and resolver.server == "vllm"}


def is_requested(resolver: DtypeResolver, role: str) -> bool:
    return bool(resolver.config.get(f"{resolver.engine_node(role)}.full_determinism"))


def is_read(resolver: DtypeResolver, role: str) -> bool:
    """Return whether the engine that runs the role reads its full_determinism, by the tree's source."""
    implementation = resolver.implementation(role)
    engine = "fsdp" if implementation == "engine" else implementation
    file = resolver.tree.root / f"verl/workers/engine/{engine}/transformer_impl.py"  # legacy workers have none
    return file.exists() and "full_determinism" in file.read_text()


def determinism_findings(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield each ``full_determinism`` that is not read, and what it does to a rollout that reads it."""
    parts, name = deterministic_parts(resolver), resolver.tree.name
    for role, applies in parts.items():
        if role != "rollout" and is_requested(resolver, role) and not applies:
            code = {"worker": "legacy workers"}.get(resolver.implementation(role), resolver.implementation(role))
            effect = f"is not read by {name}'s {code}"
            yield Finding(f"{resolver.engine_node(role)}.full_determinism", True, effect, "remove it")
    if resolver.config.get(KEY) and resolver.server != "vllm":
        yield Finding(KEY, True, f"is not read by {name}'s {resolver.server} server", f"{ROLLOUT}.name=vllm")
    elif parts["rollout"]:
        yield from rollout_consequences(resolver)


def rollout_consequences(resolver: DtypeResolver) -> Iterator[Finding]:
    """Yield what verl's vLLM server does with ``full_determinism``, and where the vLLM beside it cannot."""
    get = resolver.config.get
    if (answers := get(f"{ROLLOUT}.n", 1)) > 1:
        effect = f"gives all requests of a server one seed: the {answers} answers to a prompt that it samples are equal"
        yield Finding(KEY, True, effect, f"{KEY}=false")
    if get("trainer.use_v1") and not resolver.config.has("async_training"):
        effect = "sends all prompts to one server: the v1 trainer numbers no prompts, so all have the request id det-0"
        yield Finding(KEY, True, effect, "trainer.use_v1=false")
    package = package_folder("vllm", resolver.tree.root)
    if package is None:
        return
    if not knows_batch_invariance(package):
        effect = f"asks for {BATCH_INVARIANT}, which vLLM {version(package)} does not have"
        yield Finding(KEY, True, effect, "a vLLM that has it")
        return
    key, invariant = f"{ROLLOUT}.engine_kwargs.vllm.attention_backend", batch_invariant_backends(package)
    if (backend := get(key)) and str(backend).upper() not in invariant:
        effect = f"is not batch-invariant in vLLM {version(package)}, which refuses it beside {KEY}=true"
        yield Finding(key, backend, effect, f"one of {', '.join(invariant)}")


def knows_batch_invariance(package: Path) -> bool:
    """Return whether the vLLM in ``package`` reads the variable, by its source."""
    files = [package / "envs.py", package / "model_executor/layers/batch_invariant.py"]
    return any(file.exists() and BATCH_INVARIANT in file.read_text() for file in files)


def batch_invariant_backends(package: Path) -> list[str]:
    """Return the names of the attention backends that the vLLM in ``package`` declares batch-invariant."""
    files = sorted((package / "v1/attention").rglob("*.py"))
    classes = [node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    by_name = {each.name: each for each in classes}

    def returned(of: ast.ClassDef, method: str) -> object:
        """Return what a method returns, that of a base where the class has none."""
        own = [each for each in of.body if isinstance(each, ast.FunctionDef) and each.name == method]
        if own:
            return returned_constant(own[0])
        bases = (by_name[base.id] for base in of.bases if isinstance(base, ast.Name) and base.id in by_name)
        return next((found for base in bases if (found := returned(base, method)) is not None), None)

    invariant = [each for each in classes if returned(each, "supports_batch_invariance") is True]
    return sorted({name for each in invariant if (name := returned(each, "get_name"))})


def returned_constant(function: ast.FunctionDef) -> object:
    """Return the constant that a function ends with returning; None where it returns something else."""
    last = function.body[-1]
    is_constant = isinstance(last, ast.Return) and isinstance(last.value, ast.Constant)
    return last.value.value if is_constant else None
